// Deadlines, failures and metrics of collectives.
#include "csrc/collective.h"

#include <limits>
#include <memory>

#include "csrc/site.h"
#include "tests/native/ranks.h"

namespace {

using jcoll::Description;
using jcoll::Site;
using jcoll::SiteMetrics;
using ranks::AllReduce;
using ranks::OnThreads;
using ranks::Outcome;
using ranks::Sum;
using ranks::Watchdog;
using std::chrono::milliseconds;

using Clock = std::chrono::steady_clock;

Description ShortLived(int num_ranks, const char* call_site, double timeout_s = 0.05) {
  Description d = AllReduce(num_ranks, 1, call_site);
  d.timeout_s = timeout_s;
  return d;
}

constexpr double kForEverS = 1000;
// Long enough for a few arrivals in a row on a busy machine.
constexpr double kTimeToArriveS = 0.5;

// The process-wide deadline, which sites without their own read when a collective opens: lets the
// runs that are to fail have a short one, and those that are to succeed, however busy the machine,
// a long one.
class DefaultTimeout {
 public:
  explicit DefaultTimeout(double seconds) { jcoll::SetDefaultTimeout(seconds); }
  ~DefaultTimeout() { jcoll::SetDefaultTimeout(before_); }

 private:
  const double before_ = jcoll::DefaultTimeout();
};

// The counters of a call site, as a reader of metrics sees them.
std::shared_ptr<SiteMetrics> MetricsOf(const std::string& call_site) {
  for (const auto& row : jcoll::AllMetrics()) {
    if (row->call_site == call_site) return row;
  }
  EXPECT(false);
  return std::make_shared<SiteMetrics>();
}

TEST(TimeoutNamesWhoArrivedAndWhoDidNot) {
  Watchdog watchdog;
  Site site(ShortLived(8, "step.py:1", 0));
  Sum sum(8), next(8);
  {
    DefaultTimeout timeout(kTimeToArriveS);
    sum.Arrive(&site, 1, 6, 1);  // Opens it, and sets its deadline.
  }
  DefaultTimeout timeout(kForEverS);
  for (int rank : {0, 2, 3, 4}) sum.Arrive(&site, 1, rank, 1);
  OnThreads(8, [&](int rank) { next.Arrive(&site, 2, rank, rank); });
  next.Expect(28);  // Another run of the same site is not affected.
  sum.outcome.Error(0);
  for (int rank : {1, 5, 7}) sum.Arrive(&site, 1, rank, 1);  // Too late: the same error.
  for (int rank = 0; rank < 8; ++rank) {
    EXPECT_EQ(sum.outcome.Error(rank),
              "jcoll.all_reduce over axis 'x' (int32[1], direct) called at step.py:1: timed out "
              "after 0.5 s: 5 of 8 ranks arrived (0, 2-4, 6); missing: 1, 5, 7.\n"
              "  Every rank of the group must reach this call: look for a lax.cond or a loop whose "
              "condition differs between ranks, for a rank that is slow or stuck before it, or "
              "(jaxlib before 0.12) for more than 32 programs dispatched and not waited for; "
              "raise timeout_s= or JCOLL_TIMEOUT if a rank is only slow.");
    EXPECT_EQ(sum.out[rank], -1);
  }
  const auto metrics = MetricsOf("step.py:1");
  EXPECT_EQ(metrics->errors.load(), 1);
  EXPECT_EQ(metrics->calls.load(), 1);
}

TEST(TimeoutNamesTheGroup) {
  Watchdog watchdog;
  Description d = ShortLived(4, "step.py:2", kTimeToArriveS);
  d.group_of = {0, 1, 0, 1};
  d.rank_of = {0, 0, 1, 1};
  Site site(d);
  Sum sum(4);
  for (int position : {0, 2, 3}) sum.Arrive(&site, 1, position, 1);
  EXPECT_EQ(sum.outcome.Error(0), "");
  EXPECT_EQ(sum.outcome.Error(2), "");
  EXPECT_CONTAINS(sum.outcome.Error(3),
                  "1 of 2 ranks arrived (1); missing: 0, in group 1 of the axis.");
}

// A 3x2 mesh, collective over its last axis.
TEST(TimeoutNamesTheIndexOnTheOtherAxes) {
  Watchdog watchdog;
  Site site(ShortLived(2, "step.py:10", kTimeToArriveS));
  Sum rows[3] = {Sum(2), Sum(2), Sum(2)};
  for (int row : {1, 0, 2}) rows[row].Arrive(&site, 1, 0, row, row);
  rows[1].Arrive(&site, 1, 1, 5, 1);
  rows[1].Expect(6);
  for (int row : {0, 2}) {
    EXPECT_CONTAINS(rows[row].outcome.Error(0), "1 of 2 ranks arrived (0); missing: 1, at index " +
                                                    std::to_string(row) +
                                                    " of the mesh's other axes.");
  }
}

TEST(TimeoutIsKept) {
  Watchdog watchdog;
  Site site(ShortLived(2, "step.py:3", 0.2));
  const auto start = Clock::now();
  Sum sum(2);
  sum.Arrive(&site, 1, 0, 1);
  EXPECT_CONTAINS(sum.outcome.Error(0), "timed out after 0.2 s");
  EXPECT(Clock::now() - start >= milliseconds(200));
}

TEST(LateIsNotMissing) {
  Watchdog watchdog;
  Site site(ShortLived(2, "step.py:4", 60));
  Sum sum(2);
  sum.Arrive(&site, 1, 0, 1);
  std::this_thread::sleep_for(milliseconds(60));  // Several scans of the deadlines.
  EXPECT_EQ(sum.outcome.num_done(), 0);
  sum.Arrive(&site, 1, 1, 2);
  sum.Expect(3);
  const auto metrics = MetricsOf("step.py:4");
  EXPECT(metrics->skew_ns.load() >= 60'000'000);
  EXPECT_EQ(metrics->errors.load(), 0);
}

TEST(DefaultTimeoutIsReadWhenTheCollectiveOpens) {
  Watchdog watchdog;
  Site site(ShortLived(2, "step.py:5", 0));
  DefaultTimeout timeout(0.03);
  Sum sum(2);
  sum.Arrive(&site, 1, 1, 1);
  EXPECT_CONTAINS(sum.outcome.Error(1), "timed out after 0.03 s");
}

// "For ever" is a sensible thing to ask for, and must not overflow into the past.
TEST(HugeTimeoutsDoNotExpire) {
  Watchdog watchdog;
  int line = 100;
  for (double timeout_s : {1e9, 1e10, 1e18, 1e300, std::numeric_limits<double>::infinity()}) {
    const std::string call_site = "step.py:" + std::to_string(++line);
    Site site(ShortLived(2, call_site.c_str(), timeout_s));
    Sum sum(2);
    sum.Arrive(&site, 1, 0, 1);
    std::this_thread::sleep_for(milliseconds(30));
    EXPECT_EQ(sum.outcome.num_done(), 0);
    sum.Arrive(&site, 1, 1, 2);
    sum.Expect(3);
  }
}

// Runs whose missing ranks never come are forgotten in the end, and only they are.
TEST(ManyTimeoutsLeaveTheSiteUsable) {
  Watchdog watchdog;
  constexpr int kRuns = 300;
  Site site(ShortLived(2, "step.py:6", 0));
  std::vector<std::unique_ptr<Sum>> sums;
  {
    DefaultTimeout timeout(0.01);
    for (int run = 0; run < kRuns; ++run) {
      sums.push_back(std::make_unique<Sum>(2));
      sums[run]->Arrive(&site, run, 0, 1);
      if (run % 50 == 49) sums[run]->outcome.Error(0);
    }
  }
  DefaultTimeout timeout(kForEverS);
  for (int run = 0; run < kRuns; ++run) EXPECT_CONTAINS(sums[run]->outcome.Error(0), "missing: 1");
  EXPECT_EQ(MetricsOf("step.py:6")->errors.load(), kRuns);
  EXPECT(site.num_held() <= Site::kMaxFailed);
  // The latest failure is remembered: the late rank does not wait for a second deadline.
  Sum good(2);
  good.Arrive(&site, kRuns, 0, 1);
  good.Arrive(&site, kRuns, 1, 2);
  good.Expect(3);
  sums[kRuns - 1]->Arrive(&site, kRuns - 1, 1, 1);
  EXPECT_CONTAINS(sums[kRuns - 1]->outcome.Error(1), "1 of 2 ranks arrived (0); missing: 1");
  EXPECT_EQ(MetricsOf("step.py:6")->errors.load(), kRuns);
}

// However many live runs are open, they do not push out a failure whose late rank is still to come.
TEST(LiveRunsDoNotPushOutFailures) {
  Watchdog watchdog;
  Site site(ShortLived(2, "step.py:7", 0));
  Sum late(2);
  {
    DefaultTimeout timeout(0.01);
    late.Arrive(&site, 0, 0, 1);
  }
  late.outcome.Error(0);
  DefaultTimeout timeout(kForEverS);
  std::vector<std::unique_ptr<Sum>> live;
  for (int run = 1; run <= 200; ++run) {
    live.push_back(std::make_unique<Sum>(2));
    live.back()->Arrive(&site, run, 0, run);
  }
  for (int run = 1; run <= 200; ++run) live[run - 1]->Arrive(&site, run, 1, run);
  for (int run = 1; run <= 200; ++run) live[run - 1]->Expect(2 * run);
  late.Arrive(&site, 0, 1, 1);
  EXPECT_CONTAINS(late.outcome.Error(1), "1 of 2 ranks arrived (0)");
  EXPECT_EQ(MetricsOf("step.py:7")->errors.load(), 1);
}

// Arrivals race with the deadline: each run either succeeds or fails, as a whole.
TEST(DeadlineRacesWithTheLastRank) {
  Watchdog watchdog;
  Site site(ShortLived(2, "step.py:8", 0.02));
  int failed = 0, succeeded = 0;
  for (int run = 0; run < 40; ++run) {
    Sum sum(2);
    sum.Arrive(&site, run, 0, 1);
    std::this_thread::sleep_for(milliseconds(5 + run));
    sum.Arrive(&site, run, 1, 2);
    EXPECT_EQ(sum.outcome.Error(0), sum.outcome.Error(1));
    if (sum.outcome.Error(0).empty()) {
      sum.Expect(3);
      ++succeeded;
    } else {
      EXPECT_EQ(sum.out[0], -1);
      ++failed;
    }
  }
  const auto metrics = MetricsOf("step.py:8");
  EXPECT_EQ(metrics->calls.load(), succeeded);
  EXPECT_EQ(metrics->errors.load(), failed);
  EXPECT_EQ(site.num_held(), 0);
}

// An all_reduce that is large enough for ranks to stay in their handlers (Collective::Stay).
constexpr int64_t kLargeCount = 100001;

// Cores that the pool counts on.
class NumThreads {
 public:
  explicit NumThreads(int n) { jcoll::Executor::SetNumThreads(n); }
  ~NumThreads() { jcoll::Executor::SetNumThreads(before_); }

 private:
  const int before_ = jcoll::Executor::NumThreads();
};

void SpinFor(std::chrono::microseconds t) {
  const auto end = Clock::now() + t;
  while (Clock::now() < end) {
  }
}

// The others come while a rank waits, helps, waits for the last piece, or has gone.
TEST(RanksThatStayCompleteOnce) {
  Watchdog watchdog;
  NumThreads num_threads(4);
  for (int n : {2, 3, 4, 6}) {
    Site site(AllReduce(n, kLargeCount, "step.py:10"));
    for (int run = 0; run < 60; ++run) {
      Sum sum(n, kLargeCount);
      OnThreads(n, [&](int rank) {
        SpinFor(std::chrono::microseconds(rank * run * 2));
        sum.Arrive(&site, run, rank, rank + 1);
      });
      sum.Expect(n * (n + 1) / 2);
    }
    EXPECT_EQ(site.num_held(), 0);
  }
}

// A deadline ends the collective while a rank stays: all of it fails or all of it succeeds.
TEST(DeadlineRacesWithRanksThatStay) {
  Watchdog watchdog;
  NumThreads num_threads(4);
  Site site(AllReduce(3, kLargeCount, "step.py:11"));
  const auto after_the_deadline = Clock::now() + std::chrono::hours(1000);
  int num_failed = 0;
  for (int run = 0; run < 200; ++run) {
    Sum sum(3, kLargeCount);
    OnThreads(4, [&](int i) {
      SpinFor(std::chrono::microseconds(i * (run % 50)));
      if (i < 3) return sum.Arrive(&site, run, i, i + 1);
      Site::Expired expired;
      site.ExpireOverdue(after_the_deadline, &expired);
      jcoll::Executor::Get().Push(std::move(expired.tasks), jcoll::Executor::Wake::kAll);
    });
    const std::string error = sum.outcome.Error(0);
    for (int rank : {1, 2}) EXPECT_EQ(sum.outcome.Error(rank), error);
    if (error.empty()) sum.Expect(6);
    num_failed += !error.empty();
  }
  EXPECT_EQ(MetricsOf("step.py:11")->errors.load(), num_failed);
  EXPECT_EQ(site.num_held(), 0);
}

TEST(MetricsCountCollectives) {
  Watchdog watchdog;
  Description d = AllReduce(4, 1, "step.py:9");
  d.group_of = {0, 0, 1, 1};
  d.rank_of = {0, 1, 0, 1};
  Site site(d);
  Site twin(d);  // The same call in another executable: the same counters.
  constexpr int kRuns = 25;
  for (int run = 0; run < kRuns; ++run) {
    Sum sum(4);
    OnThreads(4, [&](int rank) { sum.Arrive(run % 2 ? &site : &twin, run, rank, 1); });
    sum.Expect(2);
  }
  const auto metrics = MetricsOf("step.py:9");
  EXPECT_EQ(metrics->op, "all_reduce");
  EXPECT_EQ(metrics->algorithm, "direct");
  EXPECT_EQ(metrics->axis, "'x'");
  EXPECT_EQ(metrics->dtype, "int32");
  EXPECT_EQ(metrics->num_ranks, 2);
  EXPECT_EQ(metrics->nbytes, 4);
  EXPECT_EQ(metrics->calls.load(), 2 * kRuns);  // One per group.
  EXPECT_EQ(metrics->errors.load(), 0);
  EXPECT(metrics->skew_ns.load() > 0);
  EXPECT(metrics->exec_ns.load() > 0);
  jcoll::ResetMetrics();
  EXPECT_EQ(metrics->calls.load(), 0);
  EXPECT_EQ(metrics->skew_ns.load(), 0);
  EXPECT_EQ(metrics->exec_ns.load(), 0);
}

}  // namespace
