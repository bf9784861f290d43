// Failures in a file of this process: what is known when a collective fails, where the exception
// may come too late or be lost in a log.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace jcoll {

using JsonFields = std::vector<std::pair<std::string, std::string>>;  // Names, and values in JSON.

// Bytes that are no UTF-8 become U+FFFD each.
std::string JsonText(const std::string& text);
std::string JsonTexts(const std::vector<std::string>& texts);
std::string JsonObject(const JsonFields& fields);

// Where reports go from now on, as FOLDER/jcoll-RUNTIME-HOST-PID.json; "": nowhere.
void SetReportFolder(const std::string& folder, const std::string& runtime);

// Whether ReportFailure would write anything: what it is told may take time to put together.
bool WantsReports();

// Adds a failure, its text with more fields, and writes the file anew. Returns the path, or "": no
// folder is set, it cannot be written (which stderr says), or there are enough of them.
std::string ReportFailure(const std::string& error, const JsonFields& more);

}  // namespace jcoll
