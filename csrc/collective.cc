#include "collective.h"

#include <algorithm>
#include <cstdio>

#include "memory.h"
#include "reduce.h"

namespace jcoll {
namespace {

// Below this much traffic (bytes read + written) one thread is done before a second has woken up:
// a wake-up costs 5-10 us, in which one core moves about 100 KiB.
constexpr int64_t kInlineTraffic = 256 << 10;
// A piece should take long against the atomic that hands it out (0.1 us) and short against the
// whole, so that two threads end together: 512 KiB is about 50 us.
constexpr int64_t kPieceTraffic = 512 << 10;
// Continuations longer than this are worth waking a second core for.
constexpr int64_t kLongContinuationNs = 30000;
// A continuation shorter than this has not blocked, whatever the monitor saw.
constexpr int64_t kShortestStallNs = 500000;
// After a stall this many collectives wake a thread per rank at once. Then the site is tried
// without again: a program that mixes in lax collectives pays 1 ms for that in 32 collectives; one
// that was only preempted does not pay for ever.
constexpr int kStallCredit = 32;
// Writes beyond this do not stay in cache until somebody reads them.
constexpr int64_t kStreamNBytes = 4 << 20;

std::string Seconds(double s) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.3g s", s);
  return text;
}

// "0, 2-5, 7"
std::string RankList(const std::vector<int>& ranks) {
  std::string text;
  for (size_t i = 0; i < ranks.size();) {
    size_t j = i;
    while (j + 1 < ranks.size() && ranks[j + 1] == ranks[j] + 1) ++j;
    if (!text.empty()) text += ", ";
    text += std::to_string(ranks[i]);
    if (j > i) text += (j == i + 1 ? ", " : "-") + std::to_string(ranks[j]);
    i = j + 1;
  }
  return text.empty() ? "none" : text;
}

}  // namespace

Executor::Wake SitePolicy::NextWake() {
  int credit = stall_credit_.load(std::memory_order_relaxed);
  if (credit > 0) {
    stall_credit_.store(credit - 1, std::memory_order_relaxed);
    return Executor::Wake::kAll;
  }
  if (continuation_ns_.load(std::memory_order_relaxed) > kLongContinuationNs) {
    return Executor::Wake::kCores;
  }
  return Executor::Wake::kLazy;
}

void SitePolicy::Observe(int64_t ns, bool stalled) {
  const int64_t old = continuation_ns_.load(std::memory_order_relaxed);
  continuation_ns_.store(old + (ns - old) / 8, std::memory_order_relaxed);
  if (stalled && ns > kShortestStallNs) {
    stall_credit_.store(kStallCredit, std::memory_order_relaxed);
  }
}

Collective::Collective(std::shared_ptr<const Description> description,
                       std::shared_ptr<SiteMetrics> metrics, std::shared_ptr<SitePolicy> policy,
                       int group, double timeout_s)
    : d_(std::move(description)),
      metrics_(std::move(metrics)),
      policy_(std::move(policy)),
      group_(group),
      timeout_s_(timeout_s),
      opened_(Clock::now()),
      deadline_(opened_ + std::chrono::duration_cast<Clock::duration>(
                              std::chrono::duration<double>(timeout_s))),
      buffers_(d_->group_size(group)),
      completions_(buffers_.size()),
      arrived_(buffers_.size()) {}

void Collective::Add(int rank, const RankBuffers& buffers, Completion completion) {
  buffers_[rank] = buffers;
  completions_[rank] = std::move(completion);
  arrived_[rank] = true;
  ++num_arrived_;
}

std::vector<Task> Collective::Expire() {
  failure_ = Failure{FailureCode::kDeadlineExceeded, TimeoutMessage()};
  metrics_->errors.fetch_add(1, std::memory_order_relaxed);
  std::vector<Task> tasks;
  for (size_t rank = 0; rank < arrived_.size(); ++rank) {
    if (arrived_[rank]) tasks.push_back({shared_from_this(), static_cast<int>(rank)});
  }
  return tasks;
}

std::string Collective::TimeoutMessage() const {
  std::vector<int> arrived, missing;
  for (size_t rank = 0; rank < arrived_.size(); ++rank) {
    (arrived_[rank] ? arrived : missing).push_back(static_cast<int>(rank));
  }
  std::string text = d_->Where() + ": timed out after " + Seconds(timeout_s_) + ": " +
                     std::to_string(arrived.size()) + " of " + std::to_string(arrived_.size()) +
                     " ranks arrived (" + RankList(arrived) + "); missing: " + RankList(missing);
  if (group_ != 0) text += " (group " + std::to_string(group_) + ")";
  return text +
         ".\n  Every rank of the group must reach this call: look for a lax.cond or a loop whose "
         "condition differs between ranks, or for a rank that is slow or stuck before it; raise "
         "timeout_s= or JCOLL_TIMEOUT if it is only slow.";
}

void Collective::Start() {
  last_arrival_ = Clock::now();
  failure_ = BuildMoves(*d_, buffers_, &moves_);
  if (failure_) return Finish();
  if (d_->motion == Motion::kBlocks) {
    reduce_ = GetReduceFn(d_->dtype, d_->reduce_op);
    element_nbytes_ = Size(d_->dtype);
  }
  const int64_t traffic = moves_.traffic_nbytes();
  if (traffic <= kInlineTraffic) {
    MoveInline();
    return Finish();
  }
  stream_ = moves_.written_nbytes() >= kStreamNBytes;
  for (const RankBuffers& b : buffers_) AdviseHugePages(b.outputs[0], d_->output_nbytes());
  pieces_ = moves_.Cut(kPieceTraffic);
  const int num_pieces = static_cast<int>(pieces_.size());
  pieces_left_.store(num_pieces, std::memory_order_relaxed);
  const int helpers = std::min(num_pieces, Executor::NumThreads()) - 1;
  std::vector<Task> tasks(helpers, Task{shared_from_this(), kHelp});
  Executor::Get().Push(std::move(tasks), Executor::Wake::kAll);
  TakePieces();
}

void Collective::MoveInline() {
  ScopedFlushDenormals flush;
  for (int i = 0; i < moves_.size(); ++i) {
    moves_.Run(moves_.Whole(i), reduce_, element_nbytes_, /*stream=*/false);
  }
}

void Collective::TakePieces() {
  ScopedFlushDenormals flush;
  const int num_pieces = static_cast<int>(pieces_.size());
  int done = 0;
  for (;;) {
    const int i = next_piece_.fetch_add(1, std::memory_order_relaxed);
    if (i >= num_pieces) break;
    moves_.Run(pieces_[i], reduce_, element_nbytes_, stream_);
    ++done;
  }
  // acq_rel: whoever brings the count to zero has seen, and publishes, everybody's writes.
  if (done > 0 && pieces_left_.fetch_sub(done, std::memory_order_acq_rel) == done) Finish();
}

void Collective::Finish() {
  const auto now = Clock::now();
  auto ns = [](Clock::duration d) { return std::chrono::nanoseconds(d).count(); };
  if (failure_) {
    metrics_->errors.fetch_add(1, std::memory_order_relaxed);
  } else {
    metrics_->calls.fetch_add(1, std::memory_order_relaxed);
    metrics_->skew_ns.fetch_add(ns(last_arrival_ - opened_), std::memory_order_relaxed);
    metrics_->exec_ns.fetch_add(ns(now - last_arrival_), std::memory_order_relaxed);
  }
  std::vector<Task> tasks;
  tasks.reserve(completions_.size());
  for (size_t rank = 0; rank < completions_.size(); ++rank) {
    tasks.push_back({shared_from_this(), static_cast<int>(rank)});
  }
  Executor::Get().Push(std::move(tasks), policy_->NextWake());
}

void Collective::Run(int index) {
  if (index == kHelp) return TakePieces();
  CompleteRank(index);
}

void Collective::CompleteRank(int rank) {
  const auto start = Clock::now();
  const int64_t stalls_before = Executor::Get().num_stalls();
  const Completion completion = std::move(completions_[rank]);
  completion(failure_ ? &*failure_ : nullptr);
  const auto elapsed = std::chrono::nanoseconds(Clock::now() - start).count();
  policy_->Observe(elapsed, Executor::Get().num_stalls() != stalls_before);
}

}  // namespace jcoll
