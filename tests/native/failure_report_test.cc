// Reports of failures: one file of this process, whole at any moment.
#include "csrc/failure_report.h"

#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <clocale>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>
#include <vector>

#include "check.h"

namespace {

// A new folder that reports go to, as long as this is there.
class Folder {
 public:
  Folder() {
    char name[] = "/tmp/jcoll-report-XXXXXX";
    EXPECT(mkdtemp(name) != nullptr);
    path_ = name;
    jcoll::SetReportFolder(path_, "cpu");
  }
  ~Folder() {
    jcoll::SetReportFolder("", "cpu");
    Remove();
  }
  void Remove() const { EXPECT_EQ(std::system(("rm -rf " + path_).c_str()), 0); }

 private:
  std::string path_;
};

std::string Read(const std::string& path) {
  std::ifstream file(path);
  return std::string((std::istreambuf_iterator<char>(file)), {});
}

int Count(const std::string& text, const std::string& part) {
  int count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

}  // namespace

TEST(Json) {
  EXPECT_EQ(jcoll::JsonText("a \"b\"\\\n\x01"), "\"a \\\"b\\\"\\\\\\u000a\\u0001\"");
  EXPECT_EQ(jcoll::JsonTexts({}), "[]");
  EXPECT_EQ(jcoll::JsonTexts({"a", "b"}), "[\"a\", \"b\"]");
  EXPECT_EQ(jcoll::JsonObject({{"a", "1"}, {"b", "[]"}}), "{\"a\": 1, \"b\": []}");
}

TEST(JsonIsUtf8) {
  for (const char* good : {"\u00e9", "\u20ac", "\ud7ff\ue000", "\U0001f600", "\U0010ffff"}) {
    EXPECT_EQ(jcoll::JsonText(good), "\"" + std::string(good) + "\"");
  }
  for (const char* bad :
       {"\xff", "\x80", "\xc3", "\xc1\xbf", "\xe2\x82", "\xe0\x9f\xbf", "\xed\xa0\x80",
        "\xf0\x8f\xbf\xbf", "\xf4\x90\x80\x80", "\xf5\x80\x80\x80"}) {
    std::string replaced;
    for (size_t i = 0; bad[i] != '\0'; ++i) replaced += "\\ufffd";
    EXPECT_EQ(jcoll::JsonText(bad), "\"" + replaced + "\"");
  }
  EXPECT_EQ(jcoll::JsonText("\xe2\x82"
                            "a\u00e9"),
            "\"\\ufffd\\ufffda\u00e9\"");
}

TEST(NoFolder) { EXPECT_EQ(jcoll::ReportFailure("lost", {}), ""); }

TEST(FailuresAreAdded) {
  const Folder folder;
  const std::string path = jcoll::ReportFailure("first", {{"rank", "3"}});
  EXPECT(path.find("/jcoll-cpu-") != std::string::npos);
  EXPECT(path.find("-" + std::to_string(getpid()) + ".json") != std::string::npos);
  EXPECT_EQ(jcoll::ReportFailure("second", {}), path);
  const std::string text = Read(path);
  EXPECT_EQ(Count(text, "\"error\": \"first\", \"rank\": 3}"), 1);
  EXPECT_EQ(Count(text, "\"error\": \"second\"}"), 1);
  EXPECT_EQ(access((path + ".part").c_str(), F_OK), -1);
  for (int i = 0; i < 100; ++i) jcoll::ReportFailure("later", {});
  EXPECT_EQ(Count(Read(path), "\"error\""), 64);
}

// A comma, where the locale has one, would be no JSON.
TEST(TimeHasAPoint) {
  struct Comma {
    const std::string was = std::setlocale(LC_NUMERIC, nullptr);
    ~Comma() { std::setlocale(LC_NUMERIC, was.c_str()); }
  } restored;
  for (const char* name : {"de_DE.UTF-8", "de_DE.utf8", "fr_FR.UTF-8"}) {
    if (std::setlocale(LC_NUMERIC, name) != nullptr) break;  // Not every machine has one.
  }
  const Folder folder;
  const std::string text = Read(jcoll::ReportFailure("lost", {}));
  const std::string key = "\"time\": ";
  const size_t begin = text.find(key) + key.size();
  const std::string time = text.substr(begin, text.find(", \"error\"") - begin);
  EXPECT(time.size() > 7 && time[time.size() - 7] == '.');
  EXPECT_EQ(time.find_first_not_of("0123456789."), std::string::npos);
}

TEST(ANameThatIsTaken) {
  const Folder folder;
  const std::string path = jcoll::ReportFailure("first", {});
  std::remove(path.c_str());
  EXPECT_EQ(mkdir(path.c_str(), 0700), 0);
  EXPECT_EQ(jcoll::ReportFailure("second", {}), "");
  EXPECT_EQ(access((path + ".part").c_str(), F_OK), -1);
}

// Its failures are its own, in a file of its own.
TEST(AForksChild) {
  const Folder folder;
  const std::string path = jcoll::ReportFailure("the parent's", {});
  const pid_t child = fork();
  if (child == 0) {
    const std::string own = jcoll::ReportFailure("the child's", {});
    const std::string text = Read(own);
    const bool is_right = own != path && Count(text, "\"error\"") == 1 &&
                          Count(text, "the child's") == 1 &&
                          Count(text, "\"pid\": " + std::to_string(getpid())) == 1;
    _exit(is_right ? 0 : 1);
  }
  int status = -1;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(Count(Read(path), "\"error\""), 1);
}

// Of many threads' failures none is lost, and whoever reads meanwhile finds the file whole.
TEST(AtOnce) {
  constexpr int kThreads = 8, kFailures = 5;
  const Folder folder;
  const std::string path = jcoll::ReportFailure("first", {});
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&path] {
      for (int k = 0; k < kFailures; ++k) {
        jcoll::ReportFailure("lost", {});
        const std::string text = Read(path);
        EXPECT(text.size() > 3 && text.substr(text.size() - 3) == "]}\n");
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(Count(Read(path), "\"error\""), 1 + kThreads * kFailures);
}

TEST(AFolderThatIsGone) {
  const Folder folder;
  folder.Remove();
  EXPECT_EQ(jcoll::ReportFailure("lost", {}), "");
}
