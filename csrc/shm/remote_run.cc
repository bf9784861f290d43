#include "remote_run.h"

#include <algorithm>
#include <cstring>

#include "../memory.h"

namespace jcoll {
namespace {

// Staging of one rank. Its cursors together stay in the L2 cache, where the peers' cores or the
// shared L3 find them.
constexpr int64_t kStagingNbytes = 512 << 10;
constexpr int64_t kMinLaneNbytes = 1 << 10;
constexpr int64_t kSecond = 1000000000;
constexpr int64_t kIdleNs = kSecond / 2;

uint64_t Mix(uint64_t h, uint64_t v) {
  h ^= v + 0x9e3779b97f4a7c15ull + (h << 6) + (h >> 2);
  h *= 0xff51afd7ed558ccdull;
  return h ^ (h >> 33);
}

}  // namespace

RemoteRun::RemoteRun(Setup setup) : s_(std::move(setup)), world_(World::Get()) {
  const PlanPrograms& p = *s_.programs;
  num_local_.assign(world_->num_processes(), 0);
  posts_.assign(world_->num_processes(), nullptr);
  for (int process : s_.process_of) {
    local_index_.push_back(num_local_[process]++);
    members_ = Mix(members_, static_cast<uint64_t>(process) + 1);
  }

  const int64_t rank_nbytes = s_.block_nbytes * (int64_t{p.in_blocks} + p.out_blocks);
  stream_ = ShouldStream(rank_nbytes * p.num_ranks, p.reduces, /*fans_out=*/false);
  cuts_ = ChunkCuts(s_.block_nbytes, s_.element_nbytes, p.chunks_per_block);
  const int64_t chunk_nbytes = cuts_.chunk_nbytes();
  const int64_t most =
      kStagingNbytes / (kCursors * std::max(1, p.max_slots)) / kLineNbytes * kLineNbytes;
  lane_nbytes_ = std::min(std::max(kMinLaneNbytes, most), RoundUp(chunk_nbytes, kLineNbytes));
  // One lane at least: a collective of nothing waits for all ranks, too.
  const int64_t num_lanes =
      std::max<int64_t>(1, CeilDiv(chunk_nbytes, std::max<int64_t>(1, lane_nbytes_)));
  for (int rank = 0; rank < p.num_ranks; ++rank) {
    if (s_.process_of[rank] != world_->self()) continue;
    for (int c = 0; c < kCursors; ++c) {
      Cursor cursor{rank, c};
      cursor.num_rounds = num_lanes > c ? CeilDiv(num_lanes - c, kCursors) : 0;
      if (cursor.num_rounds > 0) cursors_.push_back(cursor);
    }
  }
  cursors_left_ = cursors_.size();
  const int local = num_local_[world_->self()];
  scratch_.resize(static_cast<size_t>(local) * kCursors * p.num_scratch * lane_nbytes_);
  for (int process = 0; process < world_->num_processes(); ++process) {
    num_missing_ += process != world_->self() && num_local_[process] > 0;
  }
  expose_ = CanExpose();
  Post();
}

// Whether our ranks may expose their buffers. Each process decides for its own ranks; a peer that
// joins only now is not known to read yet.
bool RemoteRun::CanExpose() const {
  if (s_.streams != nullptr || s_.block_nbytes < World::PeerReads()) return false;
  for (int process = 0; process < world_->num_processes(); ++process) {
    if (num_local_[process] > 0 && !world_->ReadsPeers(process)) return false;
  }
  // An output in the input's place would overwrite what peers still are to read.
  return std::none_of(cursors_.begin(), cursors_.end(), [this](const Cursor& cursor) {
    const RankBuffers& b = s_.buffers[cursor.rank];
    return b.inputs[0] == b.outputs[0];
  });
}

void RemoteRun::Post() {
  const int self = world_->self();
  const int64_t areas = int64_t{num_local_[self]} * kCursors;
  arena_nbytes_ = HeadNbytes(self) + areas * s_.programs->max_slots * lane_nbytes_;
  own_ = world_->OpenPost(s_.key, members_, s_.name->signature, num_missing_, s_.name->call);
  if (own_ == nullptr) {
    Fail(FailureCode::kInternal, "more than " + std::to_string(World::kMaxPosts) +
                                     " collectives are open at once.\n"
                                     "  Wait for results now and then (jax.block_until_ready).");
  } else if (arena_nbytes_ > world_->arena_nbytes()) {
    Fail(FailureCode::kInternal,
         "it needs " + std::to_string(arena_nbytes_) + " bytes of shared memory, of " +
             std::to_string(world_->arena_nbytes()) + " in all.\n  Raise JCOLL_SHM_SIZE.");
  } else {
    ticket_ = world_->TakeTicket();
    GetReady();
  }
}

// Takes staging areas, as soon as there are some: others that are in flight may hold all there is.
bool RemoteRun::GetReady() {
  arena_offset_ = world_->Allocate(arena_nbytes_, ticket_);
  if (arena_offset_ < 0) return false;
  std::memset(Arena(world_->self()), 0, HeadNbytes(world_->self()));
  for (const Cursor& cursor : cursors_) {
    const RankBuffers& b = s_.buffers[cursor.rank];
    *ExposedOf(cursor.rank) = {static_cast<const char*>(b.inputs[0]),
                               static_cast<const char*>(b.outputs[0]), expose_};
  }
  own_->arena_offset.store(arena_offset_);
  own_->state.store(PostState::kReady);
  RingPeers();
  return true;
}

RemoteRun::Status RemoteRun::Advance() {
  moved_ = false;
  if (failure_) return Status::kFailed;
  if (arena_offset_ < 0 && !GetReady()) return Status::kRunning;
  if (num_missing_ > 0 && !AllHaveArrived()) {
    return failure_ ? Status::kFailed : Status::kRunning;
  }
  bool any = true;
  while (any) {
    any = false;
    for (Cursor& cursor : cursors_) {
      any |= Step(&cursor);
      if (failure_) return Status::kFailed;
    }
    if (any) {
      moved_ = true;
      RingPeers();
    }
  }
  if (cursors_left_ > 0) return Status::kRunning;
  if (expose_ && !std::all_of(cursors_.begin(), cursors_.end(),
                              [this](const Cursor& cursor) { return ReceiversHaveDone(cursor); })) {
    return Status::kRunning;
  }
  Finish();
  return Status::kDone;
}

bool RemoteRun::AllHaveArrived() {
  for (int process = 0; process < world_->num_processes(); ++process) {
    if (process == world_->self() || num_local_[process] == 0 || posts_[process]) continue;
    if (HasArrived(process)) {
      --num_missing_;
      moved_ = true;
    }
    if (failure_) return false;
  }
  return num_missing_ == 0;
}

bool RemoteRun::HasArrived(int process) {
  class Post* post = world_->Find(process, s_.key);
  if (post == nullptr) return false;
  const PostState state = post->state.load(std::memory_order_acquire);
  if (state == PostState::kOpen) return false;
  posts_[process] = post;
  // First of all, and of posts that have failed too: every rank is to see for itself who differs.
  if (post->signature.load() != s_.name->signature || post->members.load() != members_) {
    Mismatch(process, post->call);
    return false;
  }
  if (state == PostState::kFailed) FailLike(process);
  return state == PostState::kReady;
}

RemoteRun::Status RemoteRun::Mismatch(int process, const char* call) {
  return Fail(FailureCode::kInvalidArgument,
              "the ranks do not make the same call: " + RanksOf(world_->self()) + " made " +
                  s_.name->call + ", but " + RanksOf(process) + " made " + call +
                  ".\n  All ranks of a group must make the same collectives in the same order: the "
                  "same op, reduction, dtype, shape, root and algorithm.");
}

// Another process has failed: its cause is ours, too.
RemoteRun::Status RemoteRun::FailLike(int process) {
  const std::string cause = posts_[process]->error;
  return FailWith(
      {FailureCode::kInternal, s_.name->where + ": failed on " + RanksOf(process) + ": " + cause},
      cause);
}

// Runs the actions of a cursor that are ready. Returns whether there were any.
bool RemoteRun::Step(Cursor* cursor) {
  bool any = false;
  const RankProgram& program = s_.programs->ranks[cursor->rank];
  while (cursor->round < cursor->num_rounds) {
    if (!cursor->has_begun) {
      if (!MayBegin(*cursor)) return any;
      cursor->has_begun = true;
    }
    for (; cursor->action < program.actions.size(); ++cursor->action) {
      const RankProgram::Action& action = program.actions[cursor->action];
      if (!IsReady(*cursor, action) || !Run(*cursor, action)) return any;
      any = true;
    }
    ++cursor->round;
    cursor->action = 0;
    cursor->has_begun = false;
    CounterOf(cursor->rank, cursor->index)
        ->done.store(static_cast<uint64_t>(cursor->round), std::memory_order_release);
    any = true;
    if (cursor->round == cursor->num_rounds) --cursors_left_;
  }
  return any;
}

bool RemoteRun::MayBegin(const Cursor& cursor) {
  return cursor.round == 0 || !UsesSlots(cursor.rank) || ReceiversHaveDone(cursor);
}

bool RemoteRun::ReceiversHaveDone(const Cursor& cursor) {
  const std::vector<int32_t>& receivers = s_.programs->ranks[cursor.rank].receivers;
  return std::all_of(receivers.begin(), receivers.end(),
                     [&](int32_t receiver) { return HasDone(receiver, cursor); });
}

bool RemoteRun::HasDone(int receiver, const Cursor& cursor) {
  return CounterOf(receiver, cursor.index)->done.load(std::memory_order_acquire) >=
         static_cast<uint64_t>(cursor.round);
}

bool RemoteRun::IsReady(const Cursor& cursor, const RankProgram::Action& action) {
  return std::all_of(action.srcs.begin(), action.srcs.end(),
                     [&](const RankProgram::Operand& src) { return HasSent(src, cursor); });
}

bool RemoteRun::HasSent(const RankProgram::Operand& src, const Cursor& cursor) {
  if (src.slot == RankProgram::kNone) return true;
  const uint64_t before =
      static_cast<uint64_t>(cursor.round) * s_.programs->ranks[src.rank].num_messages;
  return CounterOf(src.rank, cursor.index)->sent.load(std::memory_order_acquire) >
         before + src.message;
}

char* RemoteRun::Arena(int process) {
  const bool is_self = process == world_->self();
  return world_->At(process, is_self ? arena_offset_ : posts_[process]->arena_offset.load());
}

RemoteRun::Counter* RemoteRun::CounterOf(int rank, int cursor) {
  return reinterpret_cast<Counter*>(Arena(s_.process_of[rank])) + AreaOf(rank, cursor);
}

RemoteRun::Exposed* RemoteRun::ExposedOf(int rank) {
  const int process = s_.process_of[rank];
  const int64_t counters = int64_t{num_local_[process]} * kCursors * int64_t{sizeof(Counter)};
  return reinterpret_cast<Exposed*>(Arena(process) + counters) + local_index_[rank];
}

// What comes before the slots in a process's arena.
int64_t RemoteRun::HeadNbytes(int process) const {
  const int64_t nbytes = kCursors * int64_t{sizeof(Counter)} + int64_t{sizeof(Exposed)};
  return RoundUp(num_local_[process] * nbytes, kLineNbytes);
}

char* RemoteRun::Slot(int rank, int cursor, int slot) {
  const int process = s_.process_of[rank];
  return Arena(process) + HeadNbytes(process) +
         (AreaOf(rank, cursor) * s_.programs->max_slots + slot) * lane_nbytes_;
}

// The stores before are seen by whoever is found awake here; see World.
void RemoteRun::RingPeers() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (int process = 0; process < world_->num_processes(); ++process) {
    if (process != world_->self() && num_local_[process] > 0) world_->Ring(process);
  }
}

void RemoteRun::Finish() {
  for (class Post* post : posts_) {
    if (post != nullptr) post->readers_left.fetch_sub(1);
  }
  if (arena_offset_ < 0 && ticket_ != kNoTicket) world_->ForgetTicket(ticket_);
  if (own_ != nullptr) world_->Retire(own_, arena_offset_, arena_offset_ < 0 ? 0 : arena_nbytes_);
  RingPeers();
}

RemoteRun::Status RemoteRun::Fail(FailureCode code, const std::string& why) {
  return FailWith({code, s_.name->where + ": " + why}, why);
}

RemoteRun::Status RemoteRun::FailWith(Failure failure, const std::string& cause) {
  failure_ = std::move(failure);
  if (own_ != nullptr) world_->Fail(own_, cause);
  Finish();
  return Status::kFailed;
}

RemoteRun::Status RemoteRun::CheckHealth(int64_t now_ns) {
  if (failure_) return Status::kFailed;
  for (int process = 0; process < world_->num_processes(); ++process) {
    if (process == world_->self() || num_local_[process] == 0) continue;
    const class Post* post = posts_[process];
    if (post != nullptr && post->state.load() == PostState::kFailed) {
      return FailLike(process);
    }
    const std::string fate = world_->Fate(process);
    if (!fate.empty()) {
      return Fail(FailureCode::kInternal, RanksOf(process) + " will not come: " + fate + ".");
    }
    if (post == nullptr) {
      const class Post* other =
          world_->FindConflict(process, s_.key, members_, s_.opened_ns, now_ns,
                               /*waits=*/IsIdle(process, now_ns) && IsIdle(world_->self(), now_ns));
      if (other != nullptr) {
        world_->SettleConflicts(now_ns);
        return Mismatch(process, other->call);
      }
    }
  }
  if (now_ns - s_.opened_ns > s_.timeout_s * kSecond) {
    return Fail(FailureCode::kDeadlineExceeded, DeadlineText());
  }
  return Status::kRunning;
}

// Two processes that wait for each other in different calls, without computing anything, will do so
// for ever.
bool RemoteRun::IsIdle(int process, int64_t now_ns) const {
  const int64_t since = world_->IdleSince(process);
  return now_ns - s_.opened_ns > kSecond && since > 0 && now_ns - since > kIdleNs;
}

std::string RemoteRun::RanksOf(int process) const {
  std::string ranks;
  int count = 0;
  for (int rank = 0; rank < static_cast<int>(s_.process_of.size()); ++rank) {
    if (s_.process_of[rank] != process) continue;
    ranks += (count++ ? ", " : "") + std::to_string(rank);
  }
  return (count == 1 ? "rank " : "ranks ") + ranks + " (" + world_->NameOf(process) + ")";
}

// The processes that our ranks wait for.
std::string RemoteRun::Laggards() {
  std::vector<bool> awaited(world_->num_processes());
  for (const Cursor& cursor : cursors_) {
    const RankProgram& program = s_.programs->ranks[cursor.rank];
    if (!cursor.has_begun) {  // Or it has done all rounds: then this counts if it exposes buffers.
      for (int32_t receiver : program.receivers) {
        if (!HasDone(receiver, cursor)) awaited[s_.process_of[receiver]] = true;
      }
      continue;
    }
    for (const RankProgram::Operand& src : program.actions[cursor.action].srcs) {
      if (!HasSent(src, cursor)) awaited[s_.process_of[src.rank]] = true;
    }
  }
  std::string list;
  for (int process = 0; process < world_->num_processes(); ++process) {
    if (awaited[process]) list += (list.empty() ? "" : ", ") + RanksOf(process);
  }
  return list.empty() ? "some of them" : list;
}

std::string RemoteRun::DeadlineText() {
  std::string arrived = RanksOf(world_->self()), missing;
  for (int process = 0; process < world_->num_processes(); ++process) {
    if (process == world_->self() || num_local_[process] == 0) continue;
    std::string& list = posts_[process] ? arrived : missing;
    list += (list.empty() ? "" : ", ") + RanksOf(process);
  }
  char seconds[32];
  std::snprintf(seconds, sizeof(seconds), "%.10g s", s_.timeout_s);
  if (arena_offset_ < 0) {
    return std::string("timed out after ") + seconds +
           ": other collectives in flight held all shared memory.\n  Raise JCOLL_SHM_SIZE, or keep "
           "fewer collectives in flight.";
  }
  if (missing.empty()) {
    return std::string("timed out after ") + seconds +
           ": all ranks arrived, but no more came from " + Laggards() +
           ".\n  Look for a process that is stopped or starved; raise timeout_s= or JCOLL_TIMEOUT "
           "if "
           "it is only slow.";
  }
  return std::string("timed out after ") + seconds + ": arrived: " + arrived +
         "; missing: " + missing +
         ".\n  Every rank of the group must reach this call: look for a process that is slow, "
         "stuck "
         "or stopped; raise timeout_s= or JCOLL_TIMEOUT if it is only slow.";
}

}  // namespace jcoll
