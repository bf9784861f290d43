// A test harness in one header, so that the native tests need a compiler and nothing else.
//
//   TEST(SumOfTwo) { EXPECT_EQ(1 + 1, 2); }
//
// Each *_test.cc is one program (this header brings its main); an argument runs only the cases
// whose name contains it. A failed EXPECT is printed and counted, and the case goes on; any thread
// may call it.
#ifndef JCOLL_TESTS_NATIVE_CHECK_H_
#define JCOLL_TESTS_NATIVE_CHECK_H_

#include <atomic>
#include <cstdio>
#include <cstring>
#include <sstream>
#include <string>
#include <type_traits>
#include <vector>

namespace check {

struct Case {
  const char* name;
  void (*body)();
};
inline std::vector<Case>& Cases() {
  static std::vector<Case> cases;
  return cases;
}
inline bool Register(Case c) { return Cases().push_back(c), true; }

inline std::atomic<int> failures{0};
inline void Report(bool ok, const char* file, int line, const std::string& what) {
  if (ok) return;
  ++failures;
  std::fprintf(stderr, "%s:%d: expected %s\n", file, line, what.c_str());
}

template <typename T>
std::string Show(const T& value) {
  std::ostringstream out;
  out.precision(17);
  if constexpr (std::is_enum_v<T>) {
    out << +static_cast<std::underlying_type_t<T>>(value);
  } else if constexpr (std::is_arithmetic_v<T>) {
    out << +value;  // a number, for int8_t too
  } else {
    out << value;
  }
  return out.str();
}

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wsign-compare"  // v.size() against a literal
template <typename A, typename B>
void Equal(const A& a, const B& b, const char* text, const char* file, int line) {
  if (!(a == b)) Report(false, file, line, text + (": " + Show(a)) + " against " + Show(b));
}
#pragma GCC diagnostic pop

inline void Contains(const std::string& text, const std::string& part, const char* file, int line) {
  Report(text.find(part) != std::string::npos, file, line, "'" + part + "' in: " + text);
}

inline int Main(const char* filter) {
  int ran = 0, before = 0;
  for (const Case& c : Cases()) {
    if (std::strstr(c.name, filter) == nullptr) continue;
    c.body();
    std::printf("%s %s\n", failures == before ? "ok    " : "FAILED", c.name);
    before = failures;
    ++ran;
  }
  std::printf("%d cases, %d failed expectations\n", ran, before);
  return ran > 0 && before == 0 ? 0 : 1;  // a filter that matches nothing is a failure
}

}  // namespace check

#define TEST(name)                                                       \
  static void name();                                                    \
  static const bool name##_registered = check::Register({#name, &name}); \
  static void name()
#define EXPECT(cond) check::Report(static_cast<bool>(cond), __FILE__, __LINE__, #cond)
#define EXPECT_EQ(a, b) check::Equal((a), (b), #a " == " #b, __FILE__, __LINE__)
#define EXPECT_CONTAINS(text, part) check::Contains((text), (part), __FILE__, __LINE__)

int main(int argc, char** argv) { return check::Main(argc > 1 ? argv[1] : ""); }

#endif  // JCOLL_TESTS_NATIVE_CHECK_H_
