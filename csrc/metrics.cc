#include "metrics.h"

#include <map>
#include <mutex>

#include "description.h"
#include "failure_report.h"
#include "fork_safe.h"

namespace jcoll {
namespace {

struct Table {
  std::mutex mu;
  std::map<std::string, std::shared_ptr<SiteMetrics>> rows;
  void ForgetParent() {}  // What it has counted until then is the child's, too.
};

}  // namespace

void SiteMetrics::Reset() {
  for (auto* counter : {&calls, &errors, &rows_nbytes, &mapped_nbytes, &skew_ns, &exec_ns})
    counter->store(0);
}

std::shared_ptr<SiteMetrics> MetricsFor(const Description& d) {
  const std::string key = d.Where() + "|" + std::to_string(d.group_size(0));
  Table& table = ForkSafe<Table>();
  std::lock_guard<std::mutex> lock(table.mu);
  std::shared_ptr<SiteMetrics>& row = table.rows[key];
  if (row == nullptr) {
    row = std::make_shared<SiteMetrics>();
    row->op = d.op;
    row->algorithm = d.algorithm;
    row->axis = d.axis;
    row->dtype = d.dtype_name;
    row->call_site = d.call_site;
    row->num_ranks = d.group_size(0);
    row->nbytes = d.nbytes;
  }
  return row;
}

std::vector<std::shared_ptr<SiteMetrics>> AllMetrics() {
  Table& table = ForkSafe<Table>();
  std::lock_guard<std::mutex> lock(table.mu);
  std::vector<std::shared_ptr<SiteMetrics>> rows;
  for (const auto& [key, row] : table.rows) rows.push_back(row);
  return rows;
}

void ResetMetrics() {
  for (const auto& row : AllMetrics()) row->Reset();
}

void ReportWithMetrics(const std::string& error) {
  if (!WantsReports()) return;
  std::string sites;
  for (const auto& row : AllMetrics()) {
    const JsonFields fields = {{"op", JsonText(row->op)},
                               {"axis", JsonText(row->axis)},
                               {"algorithm", JsonText(row->algorithm)},
                               {"call_site", JsonText(row->call_site)},
                               {"num_ranks", std::to_string(row->num_ranks)},
                               {"nbytes", std::to_string(row->nbytes)},
                               {"calls", std::to_string(row->calls.load())},
                               {"errors", std::to_string(row->errors.load())}};
    sites += (sites.empty() ? "" : ", ") + JsonObject(fields);
  }
  ReportFailure(error, {{"sites", "[" + sites + "]"}});
}

}  // namespace jcoll
