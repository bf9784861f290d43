// One collective of one group in one run: who has arrived, the data movement, the completions.
//
// Life: opened by the first rank's Add; when the last rank has been added, Start moves the data
// (on the calling thread, with helpers if it is large), then completes the calling thread's rank
// and queues the completions of the others. No thread waits for a rank but for a moment in Stay.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "description.h"
#include "executor.h"
#include "failure.h"
#include "metrics.h"
#include "moves.h"
#include "plan_run.h"
#include "shm/engine.h"
#include "shm/row_run.h"

namespace jcoll {

// Tells one rank that its outputs are ready (null), or why they never will be. Called once: on a
// worker, where it runs the rest of the rank's program, which may block or take long (executor.h);
// or, for the rank that came last and those that stay, before Site::Arrive returns, where it must
// do no more than mark the future: the rest of the program begins when the handler has returned.
using Completion = std::function<void(const Failure*)>;

// What a site has learned about its continuations; steers Executor::Wake. Shared by all collectives
// of a site and alive as long as any of them.
class SitePolicy {
 public:
  // How to queue the completions of one collective.
  Executor::Wake NextWake(int num_continuations);
  // Whether the completions of the next collective should be timed: some suffice, and reading the
  // clock is a good part of a small collective.
  bool NextIsTimed();
  // A completion ran for `ns`.
  void ObserveTime(int64_t ns);
  // The queue stood still while a completion ran.
  void ObserveStall();
  // Whether a rank should stay in its handler to wait for the others (Collective::Stay). Where the
  // thread that stays is the one that launches the other ranks' programs they cannot come.
  // Asked and told once a collective.
  bool NextStays();
  void ObserveStay(bool in_vain);

 private:
  std::atomic<int64_t> continuation_ns_{0};  // Moving average.
  std::atomic<int> stall_credit_{0};         // Collectives that will still wake everybody.
  std::atomic<uint32_t> num_collectives_{0};
  std::atomic<int> stays_to_skip_{0};  // Still.
  std::atomic<int> last_skip_{0};      // After the last one in vain.
};

class Collective : public Runnable,
                   public RemoteTask,
                   public std::enable_shared_from_this<Collective> {
 public:
  using Clock = Executor::Clock;

  Collective(std::shared_ptr<const Description> description, std::shared_ptr<SiteMetrics> metrics,
             std::shared_ptr<SitePolicy> policy);

  // These are called under the site's mutex.
  // Begins a life; the object is fresh or IsOver. `visit`: how many the site has opened before for
  // this group; counted only where ranks are in several processes. `is_overtaken`: by a later
  // launch, so that the count says nothing.
  void Open(int group, int64_t mesh_group, double timeout_s, int64_t visit, bool is_overtaken);
  // Completed, and no thread will touch it again.
  bool IsOver() const { return num_users_.load(std::memory_order_acquire) == 0; }
  bool HasRank(int rank) const { return arrived_[rank]; }
  void Add(int rank, const RankBuffers& buffers, Completion completion);
  // All ranks of this process.
  bool AllArrived() const { return num_arrived_ == num_here(); }
  bool IsExpired(Clock::time_point now) const { return now >= deadline_; }
  // A rank that is not the last may stay in its handler for a moment and take part in the work:
  // sooner than a worker wakes up. Where it may, this counts it as staying; the caller then calls
  // Stay without the mutex.
  // `num_ranks`: that run at once in this process.
  bool BeginStay(int rank, int64_t num_ranks);
  // Marks as failed and returns the completions of those who have arrived, to be pushed. The
  // collective stays known to the site, so that late ranks get the error too.
  std::vector<Task> Expire(int64_t num_mesh_groups);
  // A task that completes a rank of a failed collective.
  Task CompletionOf(int rank);
  const std::optional<Failure>& failure() const { return failure_; }
  bool failed() const { return failure_.has_value(); }
  int group() const { return group_; }
  int64_t mesh_group() const { return mesh_group_; }

  // All ranks are there: does the work and completes. Called once, without locks, by the handler of
  // the rank that came last.
  void Start(int last_rank);

  // Waits, helps, and completes the rank if all is done in time; else leaves that to a worker.
  void Stay(int rank);

  // RemoteTask, for ranks in several processes: called by the progress thread once Start has handed
  // the collective to it.
  bool AdvanceRemote(bool check, int64_t now_ns) override;
  bool RemoteMoved() const override { return remote_->moved(); }

  // Runnable: index >= 0 completes a rank, counted from first_completed_; others take pieces of the
  // work until none is left.
  void Run(int index) override;

 private:
  // Ranks of this process are numbered 0 .. num_here() - 1 here, among each other.
  int num_here() const {
    return static_cast<int>(is_remote_ ? ranks_here_.size() : arrived_.size());
  }
  int RankHere(int i) const { return is_remote_ ? ranks_here_[i] : i; }

  // collective_remote.cc
  void FindProcesses();
  void StartRemote(int last_rank);
  RemoteWork::Status AdvanceInHandler();
  RemoteRun::Setup RemoteSetup() const;
  bool IsOfOneHost() const;
  void Refuse(const std::string& why);
  void FinishRemote(RemoteWork::Status status, int rank_here);

  // In one process rows are moved in one step, whatever the plan.
  bool PlanIsFollowed() const { return d_->motion == Motion::kBlocks && !d_->plans.empty(); }
  void PrepareWork();
  int64_t traffic_nbytes() const;
  void WorkInline(int last_rank);
  void WorkInParallel(int last_rank);
  void RunPiece(int piece);
  void PrepareOutputs();
  // `rank_here`: the rank whose handler is on the stack, or -1 on a helper. Its own completion
  // needs no thread: XLA has not seen the future yet, so that setting it runs nothing.
  void TakePieces(int rank_here);
  void Finish(int rank_here);
  void CompleteAll(int rank_here, uint64_t staying);
  int RankAt(int index) const { return RankHere((first_completed_ + index) % num_here()); }
  void Complete(int rank);
  // Complete, and tells the policy what the rest of the rank's program did.
  void CompleteTimed(int rank);
  std::string TimeoutText(int64_t num_mesh_groups) const;

  const std::shared_ptr<const Description> d_;
  const std::shared_ptr<SiteMetrics> metrics_;
  const std::shared_ptr<SitePolicy> policy_;
  int group_ = 0;
  int64_t mesh_group_ = 0;
  double timeout_s_ = 0;
  Clock::time_point opened_;
  Clock::time_point deadline_;
  // Tasks queued or running, and one for the time until Start has returned.
  std::atomic<int> num_users_{0};
  bool is_timed_ = false;

  // Ranks in several processes.
  bool is_remote_ = false;
  int64_t visit_ = 0;
  bool is_overtaken_ = false;
  std::vector<int> process_of_;  // By rank, as World counts them.
  std::vector<int> ranks_here_;
  uint64_t members_ = 0;  // See RemoteRun::Setup.
  std::unique_ptr<RemoteWork> remote_;

  std::vector<RankBuffers> buffers_;
  std::vector<Completion> completions_;
  int first_completed_ = 0;
  std::vector<char> arrived_;
  int num_arrived_ = 0;
  Clock::time_point last_arrival_;
  std::optional<Failure> failure_;

  MoveList moves_;
  ReduceFn reduce_ = nullptr;
  int64_t element_nbytes_ = 1;
  bool stream_ = false;
  bool fresh_outputs_ = false;
  std::vector<MoveList::Piece> pieces_;  // Of moves_; those of plan_run_ are its lanes.
  PlanRun plan_run_;
  int num_pieces_ = 0;
  std::atomic<int> next_piece_{0};
  std::atomic<int> pieces_left_{0};

  // Ranks in Stay, one bit each. Whoever clears a bit takes over the rank's completion: the rank
  // itself when it goes, or Finish and Expire, who leave it to the rank, which sees it.
  std::atomic<uint64_t> staying_{0};
  std::atomic<bool> pieces_are_ready_{false};
  bool may_stay_ = false;
  int num_stayed_ = 0;
};

}  // namespace jcoll
