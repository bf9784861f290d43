#include "remote_run.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "../memory.h"
#include "../rank_list.h"

namespace jcoll {
namespace {

// Staging of one rank. Its cursors together stay in the L2 cache, where the peers' cores or the
// shared L3 find them; lanes of less are more often waited for. In chains of 8 over 2 processes on
// an EPYC (1 MiB of L2) all_reduce of 16 MiB took 5260 us with 256 KiB, 4390 with 512, 4100 with
// 1 MiB, 4280 with 2; over 4 processes, of 4 MiB, 4520, 3990, 3840, 3460.
constexpr int64_t kStagingNbytes = 1 << 20;
constexpr int64_t kMinLaneNbytes = 1 << 10;
constexpr int64_t kSecond = 1000000000;
constexpr int64_t kIdleNs = kSecond / 2;

std::string Joined(const std::string& list, const std::string& more) {
  return list + (list.empty() ? "" : ", ") + more;
}

}  // namespace

RemoteRun::RemoteRun(Setup setup) : s_(std::move(setup)), world_(World::Get()) {
  const PlanPrograms& p = *s_.programs;
  num_local_.assign(world_->num_processes(), 0);
  posts_.assign(world_->num_processes(), nullptr);
  for (int process : s_.process_of) local_index_.push_back(num_local_[process]++);

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
  // Who reads the results finds them in the cache where they fit there beside the operands: in
  // chains of 8 over 2 processes on an EPYC with 32 MiB of L3, all_to_all of 4 MiB took 250 us (390
  // streaming), of 8 MiB 830 (790), of 16 MiB 2100 (1450), reduce_scatter of 16 MiB 4000 (3200);
  // over 4, all_to_all of 4 MiB 1070 (980), of 16 MiB 4500 (3750), of 64 MiB 18600 (12400).
  // all_reduce is as fast either way.
  stream_ = s_.buffers_nbytes >= LastLevelCacheNbytes();
  cursors_left_ = cursors_.size();
  const int local = num_local_[world_->self()];
  scratch_.resize(static_cast<size_t>(local) * kCursors * p.num_scratch * lane_nbytes_);
  for (int process = 0; process < world_->num_processes(); ++process) {
    num_missing_ += process != world_->self() && num_local_[process] > 0;
  }
  exposure_ = ChooseExposure();
  Announce();
}

void RemoteRun::Announce() {
  const int self = world_->self();
  auto open = [&](bool as_failed) {
    return world_->OpenPost(s_.key, s_.members, s_.name->signature, num_local_, s_.name->call,
                            s_.name->site, as_failed);
  };
  const int64_t areas = int64_t{num_local_[self]} * kCursors;
  arena_nbytes_ = HeadNbytes(self) + areas * s_.programs->max_slots * lane_nbytes_;
  own_ = open(/*as_failed=*/false);
  if (own_ == nullptr) {
    own_ = open(/*as_failed=*/true);
    Fail(FailureCode::kInternal,
         "so many collectives are open at once that it has no place among them: each has " +
             std::to_string(World::kWindow - World::kReserve) + " to choose from, of " +
             std::to_string(World::kMaxPosts) +
             ", which are taken.\n  Wait for results now and then (jax.block_until_ready).");
  } else if (const auto told = world_->WhatWasTold(s_.key)) {
    FailWith({FailureCode::kInvalidArgument, s_.name->where + ": " + told->error}, told->error,
             told->own);
  } else if (!s_.refusal.empty()) {
    Fail(FailureCode::kInternal, s_.refusal);
  } else if (world_->HasLeft(self)) {
    Fail(FailureCode::kInternal, RanksOf(self) + " will not come: " + world_->Fate(self) + ".");
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
                               static_cast<const char*>(b.outputs[0]), exposure_};
  }
  own_->arena_offset.store(arena_offset_);
  own_->SetState(PostState::kReady);
  RingPeers();
  return true;
}

RemoteRun::Status RemoteRun::Advance() {
  moved_ = false;
  if (failure_) return Status::kFailed;
  if (arena_offset_ < 0 && !GetReady()) return Status::kRunning;
  if (num_missing_ > 0) LookForArrivals();
  if (failure_) return Status::kFailed;
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
  if (cursors_left_ > 0 || num_missing_ > 0) return Status::kRunning;
  if (exposure_ != Exposure::kNone &&
      !std::all_of(cursors_.begin(), cursors_.end(),
                   [this](const Cursor& cursor) { return ReceiversHaveDone(cursor); })) {
    return Status::kRunning;
  }
  Finish();
  return Status::kDone;
}

void RemoteRun::LookForArrivals() {
  for (int process = 0; process < world_->num_processes(); ++process) {
    if (process == world_->self() || num_local_[process] == 0 || posts_[process]) continue;
    if (HasArrived(process)) {
      --num_missing_;
      moved_ = true;
    }
    if (failure_) return;
  }
  if (num_missing_ == 0) all_came_ns_ = MonotonicNs();
}

bool RemoteRun::HasArrived(int process) {
  Post* post = world_->FindAndHold(process, s_.key);
  if (post == nullptr) return false;
  posts_[process] = post;
  // First of all, and of posts that have failed too: every rank is to see for itself who differs.
  if (post->signature.load() != s_.name->signature || post->members.load() != s_.members) {
    Mismatch(process, post->call.Get() + post->site.Get());
    return false;
  }
  if (post->state() != PostState::kFailed) return true;
  FailLike(process);
  return false;
}

// `conflict`: they made it instead of ours; none if they came to ours with another call.
RemoteRun::Status RemoteRun::Mismatch(int process, const std::string& call, const Key& conflict) {
  const bool is_alike = conflict == Key{} && call.rfind(s_.name->call, 0) == 0;
  const std::string fix =
      is_alike ? "The two read alike. What differs is the size of the blocks or of the output, the "
                 "order of the ranks (the mesh's devices, axis_index_groups), ppermute's pairs, or "
                 "what their algorithm of that name sends."
               : "All ranks of a group must make the same collectives in the same order: the "
                 "same op, reduction, dtype, shape, root and algorithm.";
  const std::string why = "the ranks do not make the same call: " + RanksOf(world_->self()) +
                          " made " + s_.name->call + s_.name->site + ", but " + RanksOf(process) +
                          " made " + call + ".\n  " + fix;
  return FailWith({FailureCode::kInvalidArgument, s_.name->where + ": " + why}, why, conflict);
}

// Another process has failed: its cause is ours, too.
RemoteRun::Status RemoteRun::FailLike(int process) {
  const Post& post = *posts_[process];
  const std::string cause = post.error.Get();
  return FailWith(
      {FailureCode::kInternal, s_.name->where + ": failed on " + RanksOf(process) + ": " + cause},
      cause, {post.conflict_hi.load(), post.conflict_lo.load()});
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
  return HasCome(receiver) &&
         CounterOf(receiver, cursor.index)->done.load(std::memory_order_acquire) >=
             static_cast<uint64_t>(cursor.round);
}

bool RemoteRun::IsReady(const Cursor& cursor, const RankProgram::Action& action) {
  return std::all_of(action.srcs.begin(), action.srcs.end(),
                     [&](const RankProgram::Operand& src) { return HasSent(src, cursor); });
}

bool RemoteRun::HasSent(const RankProgram::Operand& src, const Cursor& cursor) {
  if (src.slot == RankProgram::kNone) return true;
  if (!HasCome(src.rank)) return false;
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
  const int self = world_->self();
  for (int process = 0; process < world_->num_processes(); ++process) {
    if (process == self || num_local_[process] == 0) continue;
    Post* post = posts_[process];
    if (post == nullptr) post = world_->FindAndHold(process, s_.key);  // It is not to wait for us.
    if (post == nullptr) continue;
    // Who has failed itself does not come for our cause.
    if (own_ != nullptr && post->state() == PostState::kFailed) own_->LetGo(process);
    post->LetGo(self);
    post->Drop(self);
    posts_[process] = nullptr;
  }
  if (arena_offset_ < 0 && ticket_ != kNoTicket) world_->ForgetTicket(ticket_);
  if (own_ != nullptr) world_->Retire(own_, arena_offset_, arena_offset_ < 0 ? 0 : arena_nbytes_);
  RingPeers();
}

RemoteRun::Status RemoteRun::Fail(FailureCode code, const std::string& why) {
  return FailWith({code, s_.name->where + ": " + why}, why);
}

RemoteRun::Status RemoteRun::FailWith(Failure failure, const std::string& cause,
                                      const Key& conflict) {
  failure_ = std::move(failure);
  if (!(conflict == Key{})) world_->Tell(conflict, s_.key, cause);
  if (own_ != nullptr) world_->Fail(own_, cause, conflict);
  world_->LookForDeaths();
  Finish();
  return Status::kFailed;
}

RemoteRun::Status RemoteRun::CheckHealth(int64_t now_ns) {
  if (failure_) return Status::kFailed;
  for (int process = 0; process < world_->num_processes(); ++process) {
    if (process == world_->self() || num_local_[process] == 0) continue;
    if (posts_[process] != nullptr && posts_[process]->state() == PostState::kFailed) {
      return FailLike(process);
    }
    const bool is_lost = WillNotCome(process);
    if (failure_) return Status::kFailed;
    if (is_lost) {
      return Fail(FailureCode::kInternal,
                  RanksOf(process) + " will not come: " + world_->Fate(process) + ".");
    }
    if (posts_[process] != nullptr) continue;
    const bool waits = IsIdle(process, now_ns) && IsIdle(world_->self(), now_ns);
    const auto conflict =
        world_->FindConflict(process, s_.key, s_.members, s_.opened_ns, now_ns - kSecond, waits);
    if (conflict) {
      return Mismatch(process, conflict->call, conflict->key);
    }
  }
  if (now_ns - s_.opened_ns > s_.timeout_s * kSecond) {
    return FailByDeadline(now_ns);
  }
  return Status::kRunning;
}

// Where a process that is busy with something else has kept CheckHealth from calling it a mismatch,
// it is one all the same: the others are not to take it for another one in their next collective.
RemoteRun::Status RemoteRun::FailByDeadline(int64_t now_ns) {
  Key conflict;
  for (int process = 0; process < world_->num_processes(); ++process) {
    if (process == world_->self() || num_local_[process] == 0 || posts_[process]) continue;
    const auto found =
        world_->FindConflict(process, s_.key, s_.members, s_.opened_ns, now_ns, /*waits=*/true);
    if (found) conflict = found->key;
  }
  const std::string text = DeadlineText();
  return FailWith({FailureCode::kDeadlineExceeded, s_.name->where + ": " + text}, text, conflict);
}

// Whether a process will not do its part. One that has left, or even died, after it had done it is
// no loss to us; one that has arrived and leaves does it yet.
bool RemoteRun::WillNotCome(int process) {
  const bool is_dead = world_->IsDead(process);
  if (!is_dead && !world_->HasLeft(process)) return false;
  LookForArrivals();  // It may have come and gone since we looked.
  const Post* post = posts_[process];
  if (is_dead) return post == nullptr || post->state() != PostState::kDone;
  return post == nullptr && world_->Find(process, s_.key) == nullptr;
}

// Two processes that wait for each other in different calls, without computing anything, will do so
// for ever.
bool RemoteRun::IsIdle(int process, int64_t now_ns) const {
  const int64_t since = world_->IdleSince(process);
  return now_ns - s_.opened_ns > kSecond && since > 0 && now_ns - since > kIdleNs;
}

std::string RemoteRun::RanksOf(int process) const {
  std::vector<int> ranks;
  for (int rank = 0; rank < static_cast<int>(s_.process_of.size()); ++rank) {
    if (s_.process_of[rank] == process) ranks.push_back(rank);
  }
  return (ranks.size() == 1 ? "rank " : "ranks ") + RankList(ranks) + " (" +
         world_->NameOf(process) + ")";
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
    if (awaited[process]) list = Joined(list, RanksOf(process));
  }
  return list.empty() ? "some of them" : list;
}

std::string RemoteRun::DeadlineText() {
  char seconds[32];
  std::snprintf(seconds, sizeof(seconds), "%.10g s", s_.timeout_s);
  const std::string after = std::string("timed out after ") + seconds;
  if (arena_offset_ < 0) {
    return after +
           ": other collectives in flight held all shared memory.\n  Raise JCOLL_SHM_SIZE, or keep "
           "fewer collectives in flight.";
  }
  std::string arrived = RanksOf(world_->self()), missing, without_memory;
  for (int process = 0; process < world_->num_processes(); ++process) {
    if (process == world_->self() || num_local_[process] == 0) continue;
    const bool has_come = posts_[process] != nullptr;
    const bool has_no_memory = !has_come && world_->Find(process, s_.key) != nullptr;
    std::string& list = has_come ? arrived : has_no_memory ? without_memory : missing;
    list = Joined(list, RanksOf(process));
  }
  if (missing.empty() && without_memory.empty()) {
    return after + ": all ranks arrived, but no more came from " + Laggards() +
           ".\n  Look for a process that is stopped or starved; raise timeout_s= or JCOLL_TIMEOUT "
           "if it is only slow.";
  }
  std::string text = after + ": arrived: " + arrived;
  if (!without_memory.empty()) {
    text += "; arrived, but without shared memory, which other collectives in flight hold: " +
            without_memory;
  }
  if (missing.empty()) {
    return text +
           ".\n  Raise JCOLL_SHM_SIZE, or keep fewer collectives in flight: independent ones that "
           "the ranks make in different orders can wait for each other's memory.";
  }
  return text + "; missing: " + missing +
         ".\n  Every rank of the group must reach this call: look for a process that is slow, "
         "stuck "
         "or stopped; raise timeout_s= or JCOLL_TIMEOUT if it is only slow.";
}

}  // namespace jcoll
