#include "collective.h"

#include <algorithm>
#include <cstdio>

#include "cpu_relax.h"
#include "memory.h"
#include "rank_list.h"
#include "reduce.h"

namespace jcoll {
namespace {

// Below this much traffic (bytes read + written) one thread is done before a second has woken up:
// a wake-up costs 5-10 us, in which one core moves about 100 KiB.
constexpr int64_t kInlineTraffic = 256 << 10;
// Pieces: some for every core, so that threads end together though one may have come 40 us late,
// but none so small that handing it out (0.1 us) or the look at its pages (see Prefault) counts, or
// so large that what one rank writes (1/16 of the traffic of 8 ranks) leaves the L2 cache between
// Prefault and the write.
constexpr int64_t kMinPieceTraffic = 128 << 10;
constexpr int64_t kMaxPieceTraffic = 4 << 20;
constexpr int64_t kPiecesPerCore = 8;
// Continuations that take longer than this one after the other are worth a second core, which takes
// a wake-up to have. Decoding by 8 tensor-parallel ranks (10 us each) on 2 cores: 400 tokens/s, 305
// by one core.
constexpr int64_t kLongContinuationsNs = 60000;
// After a stall this many collectives wake a thread per rank at once. Then the site is tried
// without again: a program that mixes in lax collectives pays some ms for that in 32 collectives;
// one that was only preempted does not pay for ever.
constexpr int kStallCredit = 32;
// One collective in so many has its continuations timed.
constexpr uint32_t kTimedInterval = 16;

// How long a handler waits for the other ranks, and for the last piece of the work. Only where
// every rank has a core: on 2 cores, all_reduce of 1 MiB on 4 ranks took 1.3 times as long with the
// last but one staying. On 2 ranks staying saves two wake-ups, 15-25 us each: a sixth of 1 MiB.
constexpr int64_t kStayNs = 50000;
constexpr int kMaxStaying = 64;  // The bits of staying_.
// After having stayed in vain a site does not for so many collectives, twice as many each time: a
// program in which that is always so pays 50 us in 256 collectives.
constexpr int kMinSkip = 8;
constexpr int kMaxSkip = 256;

// 30 years stand for ever: far below what the clock's 64 bits of nanoseconds can hold. NaN, too.
constexpr double kLongestTimeoutS = 1e9;

Executor::Clock::duration ToDuration(double timeout_s) {
  const double s = timeout_s < kLongestTimeoutS ? timeout_s : kLongestTimeoutS;
  return std::chrono::duration_cast<Executor::Clock::duration>(std::chrono::duration<double>(s));
}

std::string Seconds(double s) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.10g s", s);
  return text;
}

// At most kStayNs.
template <typename Fn>
void SpinUntil(Fn done) {
  const int64_t give_up = MonotonicNs() + kStayNs;
  while (!done()) {
    if (MonotonicNs() >= give_up) return;
    CpuRelax();
  }
}

int CountBits(uint64_t set) { return __builtin_popcountll(set); }
bool HasBit(uint64_t set, int i) { return i < kMaxStaying && (set >> i & 1) != 0; }

}  // namespace

Executor::Wake SitePolicy::NextWake(int num_continuations) {
  int credit = stall_credit_.load(std::memory_order_relaxed);
  if (credit > 0) {
    stall_credit_.store(credit - 1, std::memory_order_relaxed);
    return Executor::Wake::kAll;
  }
  const int64_t each_ns = continuation_ns_.load(std::memory_order_relaxed);
  if (each_ns * num_continuations > kLongContinuationsNs) {
    return Executor::Wake::kCores;
  }
  return Executor::Wake::kLazy;
}

bool SitePolicy::NextIsTimed() {
  return num_collectives_.fetch_add(1, std::memory_order_relaxed) % kTimedInterval == 0;
}

void SitePolicy::ObserveTime(int64_t ns) {
  const int64_t old = continuation_ns_.load(std::memory_order_relaxed);
  continuation_ns_.store(old + (ns - old) / 8, std::memory_order_relaxed);
}

void SitePolicy::ObserveStall() { stall_credit_.store(kStallCredit, std::memory_order_relaxed); }

bool SitePolicy::NextStays() {
  const int skip = stays_to_skip_.load(std::memory_order_relaxed);
  if (skip == 0) return true;
  stays_to_skip_.store(skip - 1, std::memory_order_relaxed);
  return false;
}

void SitePolicy::ObserveStay(bool in_vain) {
  int skip = 0;
  if (in_vain) {
    skip = std::clamp(2 * last_skip_.load(std::memory_order_relaxed), kMinSkip, kMaxSkip);
  }
  last_skip_.store(skip, std::memory_order_relaxed);
  stays_to_skip_.store(skip, std::memory_order_relaxed);
}

Collective::Collective(std::shared_ptr<const Description> description,
                       std::shared_ptr<SiteMetrics> metrics, std::shared_ptr<SitePolicy> policy)
    : d_(std::move(description)), metrics_(std::move(metrics)), policy_(std::move(policy)) {}

void Collective::Open(int group, int64_t mesh_group, double timeout_s, int64_t visit,
                      bool is_overtaken) {
  const int num_ranks = d_->group_size(group);
  group_ = group;
  mesh_group_ = mesh_group;
  timeout_s_ = timeout_s;
  opened_ = Clock::now();
  deadline_ = opened_ + ToDuration(timeout_s);
  num_users_.store(1, std::memory_order_relaxed);
  is_timed_ = policy_->NextIsTimed();
  buffers_.resize(num_ranks);
  completions_.resize(num_ranks);
  arrived_.assign(num_ranks, false);
  num_arrived_ = 0;
  failure_.reset();
  first_completed_ = 0;
  staying_.store(0, std::memory_order_relaxed);
  pieces_are_ready_.store(false, std::memory_order_relaxed);
  visit_ = visit;
  is_overtaken_ = is_overtaken;
  FindProcesses();
  const int64_t nbytes = (d_->input_nbytes() + d_->output_nbytes()) * num_ranks;
  may_stay_ = !is_remote_ && nbytes >= kInlineTraffic && policy_->NextStays();
  num_stayed_ = 0;
}

void Collective::Add(int rank, const RankBuffers& buffers, Completion completion) {
  buffers_[rank] = buffers;
  completions_[rank] = std::move(completion);
  arrived_[rank] = true;
  ++num_arrived_;
}

std::vector<Task> Collective::Expire(int64_t num_mesh_groups) {
  const std::string text = TimeoutText(num_mesh_groups);
  failure_ = Failure{FailureCode::kDeadlineExceeded, d_->Where() + ": " + text};
  if (is_remote_ && IsOfOneHost()) Refuse(text);
  metrics_->errors.fetch_add(1, std::memory_order_relaxed);
  const uint64_t stayed = staying_.exchange(0, std::memory_order_acq_rel);
  std::vector<Task> tasks;
  for (int rank = 0; rank < static_cast<int>(arrived_.size()); ++rank) {
    if (arrived_[rank] && !HasBit(stayed, rank)) tasks.push_back(CompletionOf(rank));
  }
  return tasks;
}

Task Collective::CompletionOf(int rank) {
  num_users_.fetch_add(1, std::memory_order_relaxed);
  int i = 0;
  while (RankHere(i) != rank) ++i;
  return {shared_from_this(), i};
}

std::string Collective::TimeoutText(int64_t num_mesh_groups) const {
  std::vector<int> arrived, missing;
  for (int i = 0; i < num_here(); ++i) {
    (arrived_[RankHere(i)] ? arrived : missing).push_back(RankHere(i));
  }
  std::string text = "timed out after " + Seconds(timeout_s_) + ": " +
                     std::to_string(arrived.size()) + " of " + std::to_string(num_here()) +
                     " ranks";
  if (is_remote_) text += " of " + World::Get()->NameOf(World::Get()->self());
  text += " arrived (" + RankList(arrived) + "); missing: " + RankList(missing);
  if (d_->num_groups() > 1) text += ", in group " + std::to_string(group_) + " of the axis";
  if (num_mesh_groups > 1) {
    text += ", at index " + std::to_string(mesh_group_) + " of the mesh's other axes";
  }
  return text +
         ".\n  Every rank of the group must reach this call: look for a lax.cond or a loop whose "
         "condition differs between ranks, for a rank that is slow or stuck before it, or (jaxlib "
         "before 0.12) for more than 32 programs dispatched and not waited for; raise timeout_s= "
         "or JCOLL_TIMEOUT if a rank is only slow.";
}

void Collective::Start(int last_rank) {
  last_arrival_ = Clock::now();
  if (is_remote_) {
    StartRemote(last_rank);
    num_users_.fetch_sub(1, std::memory_order_acq_rel);
    return;
  }
  if (num_stayed_ > 0) {
    policy_->ObserveStay(/*in_vain=*/CountBits(staying_.load(std::memory_order_relaxed)) <
                         num_stayed_);
  }
  if (!PlanIsFollowed()) failure_ = BuildMoves(*d_, buffers_, &moves_);
  if (failure_) {
    Finish(last_rank);
  } else {
    PrepareWork();
    if (traffic_nbytes() <= kInlineTraffic) {
      WorkInline(last_rank);
    } else {
      WorkInParallel(last_rank);
    }
  }
  num_users_.fetch_sub(1, std::memory_order_acq_rel);
}

bool Collective::BeginStay(int rank, int64_t num_ranks) {
  if (!may_stay_ || num_ranks > std::min(Executor::NumThreads(), kMaxStaying)) return false;
  ++num_stayed_;
  num_users_.fetch_add(1, std::memory_order_relaxed);
  staying_.fetch_or(uint64_t{1} << rank, std::memory_order_relaxed);
  return true;
}

void Collective::Stay(int rank) {
  const uint64_t bit = uint64_t{1} << rank;
  auto is_ready = [this] { return pieces_are_ready_.load(std::memory_order_acquire); };
  auto is_released = [&] { return !(staying_.load(std::memory_order_acquire) & bit); };
  SpinUntil([&] { return is_ready() || is_released(); });
  if (is_ready()) {
    TakePieces(rank);
    SpinUntil(is_released);
  }
  const bool is_mine = !(staying_.fetch_and(~bit, std::memory_order_acq_rel) & bit);
  if (is_mine) Complete(rank);
  num_users_.fetch_sub(1, std::memory_order_acq_rel);
}

void Collective::PrepareWork() {
  reduce_ = nullptr;
  element_nbytes_ = 1;
  if (d_->motion == Motion::kBlocks) {
    reduce_ = GetReduceFn(d_->dtype, d_->reduce_op);
    element_nbytes_ = Size(d_->dtype);
  }
  if (PlanIsFollowed()) {
    const PlanMoves* plan = &d_->plans[group_]->moves;
    if (!plan->reduces) element_nbytes_ = 1;
    plan_run_.Begin(plan, &buffers_, d_->block_nbytes, reduce_, element_nbytes_,
                    Executor::NumThreads());
  }
}

int64_t Collective::traffic_nbytes() const {
  return PlanIsFollowed() ? plan_run_.traffic_nbytes() : moves_.traffic_nbytes();
}

void Collective::WorkInline(int last_rank) {
  ScopedFlushDenormals flush;
  if (PlanIsFollowed()) {
    for (int lane = 0; lane < plan_run_.num_lanes(); ++lane) plan_run_.RunLane(lane);
  } else {
    for (int i = 0; i < moves_.size(); ++i) {
      moves_.Run(moves_.Whole(i), reduce_, element_nbytes_, /*stream=*/false);
    }
  }
  Finish(last_rank);
}

void Collective::WorkInParallel(int last_rank) {
  PrepareOutputs();
  if (PlanIsFollowed()) {
    num_pieces_ = plan_run_.num_lanes();
  } else {
    const int64_t traffic = traffic_nbytes();
    stream_ = moves_.ShouldStream();
    const int64_t share = traffic / (kPiecesPerCore * Executor::NumThreads());
    pieces_ = moves_.Cut(std::clamp(share, kMinPieceTraffic, kMaxPieceTraffic));
    num_pieces_ = static_cast<int>(pieces_.size());
  }
  next_piece_.store(0, std::memory_order_relaxed);
  pieces_left_.store(num_pieces_, std::memory_order_relaxed);
  pieces_are_ready_.store(true, std::memory_order_release);
  const int stay = CountBits(staying_.load(std::memory_order_relaxed));
  const int helpers = std::max(0, std::min(num_pieces_, Executor::NumThreads()) - 1 - stay);
  num_users_.fetch_add(helpers, std::memory_order_relaxed);
  Executor::Get().Push(shared_from_this(), -helpers, helpers, Executor::Wake::kHelpers);
  TakePieces(last_rank);
}

// One look at every output. A look at every piece, where nothing is fresh, was a seventh of an
// all_gather of 1 MiB on 2 ranks.
void Collective::PrepareOutputs() {
  fresh_outputs_ = false;
  for (int i = 0; i < num_here(); ++i) {
    void* output = buffers_[RankHere(i)].outputs[0];
    if (!LooksFresh(output, d_->output_nbytes())) continue;
    fresh_outputs_ = true;
    AdviseHugePages(output, d_->output_nbytes());
  }
}

void Collective::TakePieces(int rank_here) {
  ScopedFlushDenormals flush;
  int done = 0;
  for (;;) {
    const int i = next_piece_.fetch_add(1, std::memory_order_relaxed);
    if (i >= num_pieces_) break;
    RunPiece(i);
    ++done;
  }
  // acq_rel: whoever brings the count to zero has seen, and publishes, everybody's writes.
  if (done > 0 && pieces_left_.fetch_sub(done, std::memory_order_acq_rel) == done) {
    Finish(rank_here);
  }
}

void Collective::RunPiece(int piece) {
  if (PlanIsFollowed()) return plan_run_.RunLane(piece);
  if (fresh_outputs_) moves_.Prefault(pieces_[piece]);
  moves_.Run(pieces_[piece], reduce_, element_nbytes_, stream_);
}

void Collective::Finish(int rank_here) {
  const auto now = Clock::now();
  auto ns = [](Clock::duration d) { return std::chrono::nanoseconds(d).count(); };
  if (failure_) {
    metrics_->errors.fetch_add(1, std::memory_order_relaxed);
    ReportWithMetrics(failure_->message);
  } else {
    metrics_->calls.fetch_add(1, std::memory_order_relaxed);
    metrics_->rows_nbytes.fetch_add(remote_ ? remote_->rows_nbytes() : moves_.rows_nbytes(),
                                    std::memory_order_relaxed);
    if (remote_) {
      metrics_->mapped_nbytes.fetch_add(remote_->mapped_nbytes(), std::memory_order_relaxed);
    }
    metrics_->skew_ns.fetch_add(ns(last_arrival_ - opened_), std::memory_order_relaxed);
    metrics_->exec_ns.fetch_add(ns(now - last_arrival_), std::memory_order_relaxed);
  }
  CompleteAll(rank_here, staying_.exchange(0, std::memory_order_acq_rel));
}

// Completes the rank whose handler is on the stack, and queues the others but for those that stay:
// they complete themselves.
void Collective::CompleteAll(int rank_here, uint64_t staying) {
  const int count = num_here();
  const auto self = shared_from_this();
  first_completed_ = 0;
  if (rank_here >= 0) {
    while (RankHere(first_completed_) != rank_here) ++first_completed_;
  }
  const int first = rank_here < 0 ? 0 : 1;
  if (staying == 0) {
    num_users_.fetch_add(count - first, std::memory_order_relaxed);
    Executor::Get().Push(self, first, count - first, policy_->NextWake(count));
  } else {
    std::vector<Task> tasks;
    for (int i = first; i < count; ++i) {
      if (!HasBit(staying, RankAt(i))) tasks.push_back({self, i});
    }
    num_users_.fetch_add(static_cast<int>(tasks.size()), std::memory_order_relaxed);
    Executor::Get().Push(std::move(tasks), policy_->NextWake(count));
  }
  if (rank_here >= 0 && !HasBit(staying, rank_here)) Complete(rank_here);
}

void Collective::Run(int index) {
  if (index < 0) {
    TakePieces(/*rank_here=*/-1);
  } else {
    CompleteTimed(RankAt(index));
  }
  num_users_.fetch_sub(1, std::memory_order_acq_rel);
}

void Collective::Complete(int rank) {
  const Completion completion = std::move(completions_[rank]);
  completions_[rank] = nullptr;
  completion(failure_ ? &*failure_ : nullptr);
}

void Collective::CompleteTimed(int rank) {
  const Executor& executor = Executor::Get();
  const int64_t stalls_before = executor.num_stalls();
  const auto start = is_timed_ ? Clock::now() : Clock::time_point();
  Complete(rank);
  if (is_timed_) policy_->ObserveTime(std::chrono::nanoseconds(Clock::now() - start).count());
  if (executor.num_stalls() != stalls_before) policy_->ObserveStall();
}

}  // namespace jcoll
