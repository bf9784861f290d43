// What a collective over several processes does besides: it finds out whose ranks are where, and
// drives its RemoteWork, first in the handler of its last rank, then on the progress thread.
#include <algorithm>

#include "collective.h"
#include "memory.h"
#include "reduce.h"
#include "shm/engine.h"

namespace jcoll {
namespace {

// How long a handler waits for other processes in a collective before it leaves it to the progress
// thread; as long as data move it goes on. Bounded: XLA's thread is not ours. As long as the
// progress thread itself would wait before it sleeps: the hand-over made all_to_all of 1 MiB over 2
// processes take 102 us with 50 us, 90 with this. Where processes take turns on a core a peer may
// be away for a time slice, 3-4 ms, and a second thread of ours would only be one more that wants
// the core: all_to_all of 16 MiB over 4 processes on 2 cores took 9.0 ms with 50 us, 5.8 with 4 ms.
constexpr int64_t kHandlerSpinNs = 500000;
constexpr int64_t kCrowdedHandlerSpinNs = 4000000;
// Smaller outputs are not worth a look at their pages.
constexpr int64_t kMinPreparedNbytes = 256 << 10;

}  // namespace

void Collective::FindProcesses() {
  is_remote_ = false;
  if (d_->process_of.empty()) return;
  process_of_.clear();
  ranks_here_.clear();
  members_ = 0;
  const World* world = World::Get();
  for (int rank = 0; rank < static_cast<int>(arrived_.size()); ++rank) {
    const int64_t position = d_->PositionOf(mesh_group_, group_, rank);
    const int64_t device = d_->device_at.empty() ? position : d_->device_at[position];
    process_of_.push_back(world->ProcessOf(d_->process_of[position]));
    members_ = Mix(Mix(members_, static_cast<uint64_t>(process_of_.back())),
                   static_cast<uint64_t>(device));
    if (process_of_.back() == world->self()) ranks_here_.push_back(rank);
  }
  is_remote_ = ranks_here_.size() < arrived_.size();
}

bool Collective::IsOfOneHost() const {
  return std::find(process_of_.begin(), process_of_.end(), -1) == process_of_.end();
}

// Other processes that have come, or will, hear why nothing comes of it.
void Collective::Refuse(const std::string& why) {
  RemoteRun::Setup setup = RemoteSetup();
  setup.refusal = why;
  RemoteRun refused(std::move(setup));
}

RemoteRun::Setup Collective::RemoteSetup() const {
  RemoteRun::Setup setup;
  setup.key = MakeKey({d_->remote_name.program, static_cast<uint64_t>(d_->site_index),
                       static_cast<uint64_t>(d_->ordinal), static_cast<uint64_t>(mesh_group_),
                       static_cast<uint64_t>(group_), static_cast<uint64_t>(visit_)});
  setup.name = &d_->remote_name;
  setup.process_of = process_of_;
  setup.members = members_;
  setup.buffers = buffers_.data();
  setup.programs = d_->ProgramsOf(group_);
  if (d_->motion == Motion::kBlocks) {
    setup.block_nbytes = d_->block_nbytes;
    setup.buffers_nbytes =
        (d_->input_nbytes() + d_->output_nbytes()) * static_cast<int64_t>(process_of_.size());
    if (setup.programs->reduces) {
      setup.reduce = GetReduceFn(d_->dtype, d_->reduce_op);
      setup.element_nbytes = Size(d_->dtype);
    }
  }
  if (is_overtaken_) {
    setup.refusal =
        "a later launch of its program came to it before this one, so that it is not known whose "
        "data belong together.\n  Wait for the results of one launch before the next "
        "(jax.block_until_ready).";
  }
  setup.timeout_s = timeout_s_;
  setup.opened_ns = MonotonicNs();
  return setup;
}

void Collective::StartRemote(int last_rank) {
  if (!IsOfOneHost()) {
    failure_ =
        Failure{FailureCode::kInvalidArgument, d_->Where() +
                                                   ": its ranks are on several hosts.\n  Use "
                                                   "algorithm=\"auto\" or \"xla\"."};
    return Finish(last_rank);
  }
  if (d_->motion == Motion::kBlocks) {
    remote_ = std::make_unique<RemoteRun>(RemoteSetup());
  } else {
    remote_ = std::make_unique<RowRun>(d_.get(), group_, RemoteSetup());
  }
  if (d_->output_nbytes() > kMinPreparedNbytes) PrepareOutputs();
  const RemoteWork::Status status = AdvanceInHandler();
  if (status != RemoteWork::Status::kRunning) return FinishRemote(status, last_rank);
  num_users_.fetch_add(1, std::memory_order_relaxed);
  RemoteEngine::Get().Add(shared_from_this());
}

// Peers that are as far as we are answer within microseconds: sooner than another thread wakes up.
RemoteWork::Status Collective::AdvanceInHandler() {
  ScopedFlushDenormals flush;
  World* world = World::Get();
  const int64_t spin_ns = world->is_crowded() ? kCrowdedHandlerSpinNs : kHandlerSpinNs;
  RemoteWork::Status status = remote_->Advance();
  int64_t give_up = MonotonicNs() + spin_ns;
  while (status == RemoteWork::Status::kRunning) {
    const int64_t now = MonotonicNs();
    if (remote_->moved()) {
      give_up = now + spin_ns;
    } else if (now >= give_up) {
      break;
    } else {
      world->Yield();
    }
    status = remote_->Advance();
  }
  return status;
}

bool Collective::AdvanceRemote(bool check, int64_t now_ns) {
  RemoteWork::Status status = remote_->Advance();
  if (status == RemoteWork::Status::kRunning && check) status = remote_->CheckHealth(now_ns);
  if (status == RemoteWork::Status::kRunning) return false;
  FinishRemote(status, /*rank_here=*/-1);
  num_users_.fetch_sub(1, std::memory_order_acq_rel);
  return true;
}

void Collective::FinishRemote(RemoteWork::Status status, int rank_here) {
  if (status == RemoteWork::Status::kFailed) failure_ = remote_->failure();
  // libstdc++'s and libc++'s steady clock on Linux is the one that MonotonicNs reads.
  const Clock::time_point all_came{std::chrono::nanoseconds(remote_->all_came_ns())};
  last_arrival_ = std::max(last_arrival_, all_came);
  Finish(rank_here);
}

}  // namespace jcoll
