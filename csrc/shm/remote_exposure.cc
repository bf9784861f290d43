// Blocks that are not staged: a RemoteRun leaves them in its ranks' buffers, and takes others from
// the buffers of peers.
#include <algorithm>
#include <cerrno>
#include <cstring>

#include "peer_reads.h"
#include "remote_run.h"

namespace jcoll {
namespace {

// Smaller blocks that peers could map are staged: the slots are in a core's cache, and who stages
// need not wait for the others to have read. In chains of 8 over 2 processes on an EPYC all_to_all
// of blocks of 32 KiB took 8 to 12 us either way; of 128 KiB 18 to 25 mapped, 25 to 32 staged.
constexpr int64_t kMinMappedNbytes = 64 << 10;

}  // namespace

// How our ranks expose their buffers. Each process decides for its own ranks; a peer that joins
// only now is not known to read yet.
RemoteRun::Exposure RemoteRun::ChooseExposure() const {
  // An output in the input's place would overwrite what peers still are to read.
  const bool is_apart = std::all_of(cursors_.begin(), cursors_.end(), [this](const Cursor& cursor) {
    const RankBuffers& b = s_.buffers[cursor.rank];
    return b.inputs[0] != b.outputs[0];
  });
  const int64_t least = World::PeerReads();
  if (s_.streams != nullptr || !is_apart || least == 0) return Exposure::kNone;
  const bool is_in_heap =
      std::all_of(cursors_.begin(), cursors_.end(), [this](const Cursor& cursor) {
        const RankBuffers& b = s_.buffers[cursor.rank];
        return world_->IsInHeap(b.inputs[0]) && world_->IsInHeap(b.outputs[0]);
      });
  if (s_.block_nbytes >= std::min(kMinMappedNbytes, least) && is_in_heap &&
      MayExpose(&World::MapsHeaps)) {
    return Exposure::kMapped;
  }
  if (s_.block_nbytes >= least && MayExpose(&World::ReadsPeers)) {
    return Exposure::kRead;
  }
  return Exposure::kNone;
}

// Whether all processes of the group can do their part.
bool RemoteRun::MayExpose(bool (World::*may)(int) const) const {
  for (int process = 0; process < world_->num_processes(); ++process) {
    if (num_local_[process] > 0 && !(world_->*may)(process)) return false;
  }
  return true;
}

RemoteRun::Exposed* RemoteRun::ExposedOf(int rank) {
  const int process = s_.process_of[rank];
  const int64_t counters = int64_t{num_local_[process]} * kCursors * int64_t{sizeof(Counter)};
  return reinterpret_cast<Exposed*>(Arena(process) + counters) + local_index_[rank];
}

// Where the value of a slot is read instead; null: in the slot.
const RankProgram::Origin* RemoteRun::OriginOf(int rank, int32_t slot) {
  if (slot == RankProgram::kNone || ExposedOf(rank)->how == Exposure::kNone) return nullptr;
  const std::optional<RankProgram::Origin>& origin = s_.programs->ranks[rank].origins[slot];
  return origin ? &*origin : nullptr;
}

bool RemoteRun::UsesSlots(int rank) {
  const auto& origins = s_.programs->ranks[rank].origins;
  return ExposedOf(rank)->how == Exposure::kNone ||
         !std::all_of(origins.begin(), origins.end(), [](const auto& o) { return o.has_value(); });
}

bool RemoteRun::IsInPeer(const RankProgram::Operand& src) {
  return src.slot != RankProgram::kNone && s_.process_of[src.rank] != world_->self() &&
         OriginOf(src.rank, src.slot) != nullptr;
}

// In the process that has it.
const char* RemoteRun::AddressOf(const RankProgram::Operand& src, int64_t begin) {
  const RankProgram::Origin* origin = OriginOf(src.rank, src.slot);
  const Exposed& peer = *ExposedOf(src.rank);
  const char* base = origin->buffer == PlanBuffer::kInput ? peer.input : peer.output;
  return base + cuts_.Offset(origin->chunk, begin);
}

// What has been taken from the memory of another process counts only if that has not failed
// meanwhile, as it then gives its buffers back.
bool RemoteRun::HasHeld(const RankProgram::Operand& src) {
  if (!IsInPeer(src)) return true;
  const int process = s_.process_of[src.rank];
  std::atomic_thread_fence(std::memory_order_acquire);
  if (posts_[process]->state() != PostState::kFailed) return true;
  FailLike(process);
  return false;
}

// Copies from the memory of another process.
bool RemoteRun::Read(const RankProgram::Operand& src, int64_t begin, int64_t nbytes, void* to) {
  const int process = s_.process_of[src.rank];
  const bool was_read = ReadPeer(world_->PidOf(process), AddressOf(src, begin), to, nbytes);
  const int error = errno;
  if (!HasHeld(src)) return false;
  if (was_read) return true;
  if (error != ESRCH) {  // Else it is dead, and CheckHealth will say so.
    Fail(FailureCode::kInternal, "the memory of " + RanksOf(process) + " cannot be read: " +
                                     std::strerror(error) + ".\n  Set JCOLL_PEER_READS=0.");
  }
  return false;
}

}  // namespace jcoll
