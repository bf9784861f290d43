#include "failure_report.h"

#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <mutex>

#include "fork_safe.h"

namespace jcoll {
namespace {

// What fails after the first ones fails because of them, and a training loop may go on for ever.
constexpr size_t kMaxFailures = 64;

struct Reports {
  std::mutex mu;
  std::string folder, runtime;
  std::vector<std::string> failures;
  void ForgetParent() { failures.clear(); }
};

std::string HostName() {
  char name[256] = {};
  gethostname(name, sizeof(name) - 1);
  return name;
}

std::string Contents(const Reports& reports) {
  std::string failures;
  for (const std::string& failure : reports.failures) {
    failures += (failures.empty() ? "\n" : ",\n") + failure;
  }
  return JsonObject({{"runtime", JsonText(reports.runtime)},
                     {"host", JsonText(HostName())},
                     {"pid", std::to_string(getpid())},
                     {"failures", "[" + failures + "]"}}) +
         "\n";
}

// Whole or not at all: whoever ends the process next may do so at any moment. 0, or errno.
int Write(const std::string& path, const std::string& contents) {
  const std::string temporary = path + ".part";
  std::FILE* file = std::fopen(temporary.c_str(), "w");
  if (file == nullptr) return errno;
  int error = std::fwrite(contents.data(), 1, contents.size(), file) < contents.size() ? errno : 0;
  if (std::fclose(file) != 0 && error == 0) error = errno;
  if (error == 0 && std::rename(temporary.c_str(), path.c_str()) == 0) return 0;
  if (error == 0) error = errno;
  std::remove(temporary.c_str());
  return error;
}

// Seconds since 1970, with a point whatever the program's locale is.
std::string Now() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  const auto us = std::chrono::duration_cast<std::chrono::microseconds>(now).count();
  std::string fraction = std::to_string(us % 1000000);
  fraction.insert(0, 6 - fraction.size(), '0');
  return std::to_string(us / 1000000) + "." + fraction;
}

// How many bytes of UTF-8 the character at `at` has, or 0: it is none.
size_t CharacterSize(const std::string& text, size_t at) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[at + i]); };
  if (byte(0) < 0x80) return 1;
  const size_t n = byte(0) >= 0xf0 ? 4 : byte(0) >= 0xe0 ? 3 : 2;
  if (byte(0) < 0xc2 || byte(0) > 0xf4 || at + n > text.size()) return 0;
  for (size_t i = 1; i < n; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
  }
  // Longer forms of what is shorter, halves of surrogate pairs, what is beyond Unicode.
  const unsigned first_two = byte(0) << 8 | byte(1);
  if ((byte(0) == 0xe0 && byte(1) < 0xa0) || (byte(0) == 0xed && byte(1) > 0x9f)) return 0;
  return n == 4 && (first_two < 0xf090 || first_two > 0xf48f) ? 0 : n;
}

}  // namespace

std::string JsonText(const std::string& text) {
  std::string json = "\"";
  for (size_t at = 0, n; at < text.size(); at += n) {
    n = CharacterSize(text, at);
    const auto c = static_cast<unsigned char>(text[at]);
    if (n == 0 || c < 0x20) {
      char escaped[8];
      std::snprintf(escaped, sizeof(escaped), "\\u%04x", n == 0 ? 0xfffdu : c);
      json += escaped;
      n = 1;
    } else {
      if (c == '"' || c == '\\') json += '\\';
      json.append(text, at, n);
    }
  }
  return json + "\"";
}

std::string JsonTexts(const std::vector<std::string>& texts) {
  std::string json = "[";
  for (const std::string& text : texts) json += (json.size() > 1 ? ", " : "") + JsonText(text);
  return json + "]";
}

std::string JsonObject(const JsonFields& fields) {
  std::string json = "{";
  for (const auto& [name, value] : fields) {
    json += (json.size() > 1 ? ", " : "") + JsonText(name) + ": " + value;
  }
  return json + "}";
}

void SetReportFolder(const std::string& folder, const std::string& runtime) {
  Reports& reports = ForkSafe<Reports>();
  std::lock_guard<std::mutex> lock(reports.mu);
  reports.folder = folder;
  reports.runtime = runtime;
  reports.failures.clear();
}

bool WantsReports() {
  Reports& reports = ForkSafe<Reports>();
  std::lock_guard<std::mutex> lock(reports.mu);
  return !reports.folder.empty() && reports.failures.size() < kMaxFailures;
}

std::string ReportFailure(const std::string& error, const JsonFields& more) {
  Reports& reports = ForkSafe<Reports>();
  std::lock_guard<std::mutex> lock(reports.mu);
  if (reports.folder.empty()) return "";
  if (reports.failures.size() >= kMaxFailures) return "";
  JsonFields fields = {{"time", Now()}, {"error", JsonText(error)}};
  fields.insert(fields.end(), more.begin(), more.end());
  reports.failures.push_back(JsonObject(fields));
  const std::string path = reports.folder + "/jcoll-" + reports.runtime + "-" + HostName() + "-" +
                           std::to_string(getpid()) + ".json";
  const int failed = Write(path, Contents(reports));
  if (failed == 0) return path;
  std::fprintf(stderr, "jcoll: the report of a failure cannot be written: %s: %s\n", path.c_str(),
               std::strerror(failed));
  return "";
}

}  // namespace jcoll
