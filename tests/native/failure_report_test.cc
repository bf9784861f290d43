// Reports of failures: one file of this process, whole at any moment.
#include "csrc/failure_report.h"

#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>

#include "check.h"

namespace {

std::string NewFolder() {
  char name[] = "/tmp/jcoll-report-XXXXXX";
  EXPECT(mkdtemp(name) != nullptr);
  return name;
}

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
  jcoll::SetReportFolder(NewFolder(), "cpu");
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
  jcoll::SetReportFolder("", "cpu");
}

TEST(AFolderThatIsGone) {
  const std::string folder = NewFolder();
  jcoll::SetReportFolder(folder, "cpu");
  rmdir(folder.c_str());
  EXPECT_EQ(jcoll::ReportFailure("lost", {}), "");
  jcoll::SetReportFolder("", "cpu");
}
