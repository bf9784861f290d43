// What an action of a RemoteRun does with memory: where its operands are, and where its results go.
#include <algorithm>

#include "../memory.h"
#include "remote_run.h"

namespace jcoll {

// Returns false if it must be tried again, or has failed.
bool RemoteRun::Run(const Cursor& cursor, const RankProgram::Action& action) {
  const int64_t lane = cursor.round * kCursors + cursor.index;
  const ChunkCuts::Range range = cuts_.Lane(action.part, lane, lane_nbytes_);
  if (s_.streams != nullptr) {
    MoveStream(cursor, action, range.begin);
  } else if (!Move(cursor, action, range)) {
    return false;
  }
  if (action.num_posts > 0) {
    // Ours alone to write: no atomic addition, which would wait for all stores before it.
    std::atomic<uint64_t>& sent = CounterOf(cursor.rank, cursor.index)->sent;
    sent.store(sent.load(std::memory_order_relaxed) + action.num_posts, std::memory_order_release);
  }
  return true;
}

bool RemoteRun::Move(const Cursor& cursor, const RankProgram::Action& action,
                     const ChunkCuts::Range& range) {
  const int64_t nbytes = range.nbytes();
  const bool is_exposed = OriginOf(cursor.rank, action.slot) != nullptr;
  void* dsts[2];
  int num_dsts = 0;
  if (action.has_chunk) dsts[num_dsts++] = Local(cursor, action.buffer, action.chunk, range.begin);
  if (action.slot != RankProgram::kNone && !is_exposed) {
    dsts[num_dsts++] = Slot(cursor.rank, cursor.index, action.slot);
  }
  if (nbytes == 0 || num_dsts == 0) return true;
  // A single operand of a peer's goes straight to where it belongs.
  if (action.srcs.size() == 1 && IsRead(action.srcs[0])) {
    if (!Read(action.srcs[0], range.begin, nbytes, dsts[0])) return false;
    CopyTo(dsts[0], dsts + 1, num_dsts - 1, nbytes, /*stream=*/false);
    return true;
  }
  thread_local std::vector<const void*> srcs;
  srcs.clear();
  if (std::any_of(action.srcs.begin(), action.srcs.end(),
                  [this](const RankProgram::Operand& src) { return IsRead(src); })) {
    fetched_.resize(action.srcs.size() * lane_nbytes_);
  }
  for (const RankProgram::Operand& src : action.srcs) {
    char* fetched = fetched_.data() + srcs.size() * lane_nbytes_;
    srcs.push_back(Source(cursor, src, range.begin, nbytes, fetched));
    if (srcs.back() == nullptr) return false;
  }
  const int num_srcs = static_cast<int>(srcs.size());
  // Not what peers are to read, which is to be in the cache.
  const bool stream = stream_ && action.num_posts == 0;
  Transfer(srcs.data(), num_srcs, dsts, num_dsts, nbytes, s_.reduce, s_.element_nbytes, stream);
  return std::all_of(action.srcs.begin(), action.srcs.end(),
                     [this](const RankProgram::Operand& src) { return HasHeld(src); });
}

// The programs of an exchange are copies only: into a slot, or out of a peer's. What stays with its
// rank has been copied already.
void RemoteRun::MoveStream(const Cursor& cursor, const RankProgram::Action& action, int64_t begin) {
  if (action.srcs.empty()) return;
  const RankProgram::Operand& src = action.srcs[0];
  const bool sends = action.slot != RankProgram::kNone;
  if (!sends && src.slot == RankProgram::kNone) return;
  const int from = sends ? cursor.rank : src.rank, to = sends ? src.chunk : cursor.rank;
  const int64_t nbytes = std::min(lane_nbytes_, s_.streams->nbytes(from, to) - begin);
  if (nbytes <= 0) return;
  if (sends) {
    s_.streams->Gather(from, to, begin, nbytes, Slot(cursor.rank, cursor.index, action.slot));
  } else {
    s_.streams->Scatter(from, to, begin, nbytes, Slot(src.rank, cursor.index, src.slot));
  }
}

// Where the bytes of an operand can be read; null if they could not be fetched.
const char* RemoteRun::Source(const Cursor& cursor, const RankProgram::Operand& src, int64_t begin,
                              int64_t nbytes, char* fetched) {
  if (src.slot == RankProgram::kNone) return Local(cursor, src.buffer, src.chunk, begin);
  const RankProgram::Origin* origin = OriginOf(src.rank, src.slot);
  if (origin == nullptr) return Slot(src.rank, cursor.index, src.slot);
  if (!IsInPeer(src)) {
    return cuts_.At(s_.buffers[src.rank], origin->buffer, origin->chunk, begin);
  }
  if (ExposedOf(src.rank)->how == Exposure::kMapped) {
    mapped_nbytes_ += nbytes;
    return world_->InHeapOf(s_.process_of[src.rank], AddressOf(src, begin));
  }
  return Read(src, begin, nbytes, fetched) ? fetched : nullptr;
}

char* RemoteRun::Local(const Cursor& cursor, PlanBuffer buffer, int chunk, int64_t begin) {
  const PlanPrograms& p = *s_.programs;
  if (buffer == PlanBuffer::kScratch) {
    const int64_t area = AreaOf(cursor.rank, cursor.index);
    return scratch_.data() + (area * p.num_scratch + chunk) * lane_nbytes_;
  }
  return cuts_.At(s_.buffers[cursor.rank], buffer, chunk, begin);
}

}  // namespace jcoll
