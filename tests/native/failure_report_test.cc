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
