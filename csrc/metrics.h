// Counters per call site. They outlive the executables that update them.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace jcoll {

struct Description;

struct SiteMetrics {
  std::string op, algorithm, axis, dtype, call_site;
  int num_ranks = 0;
  int64_t nbytes = 0;

  std::atomic<int64_t> calls{0};  // Completed collectives: one per group, not per rank.
  std::atomic<int64_t> errors{0};
  std::atomic<int64_t> mapped_nbytes{0};  // Between processes: see RemoteWork.
  std::atomic<int64_t> rows_nbytes{0};    // Of ragged ops: the rows sent, over all ranks.
  std::atomic<int64_t> skew_ns{0};        // Sum of last arrival - first arrival.
  std::atomic<int64_t> exec_ns{0};        // Sum of data in place - last arrival.

  void Reset();
};

// The counters for `d`'s call site; equal descriptions share them.
std::shared_ptr<SiteMetrics> MetricsFor(const Description& d);

std::vector<std::shared_ptr<SiteMetrics>> AllMetrics();
void ResetMetrics();

// Writes a failure to this process's report (failure_report.h), with the counters of all call
// sites.
void ReportWithMetrics(const std::string& error);

}  // namespace jcoll
