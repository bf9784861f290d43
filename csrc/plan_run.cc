#include "plan_run.h"

#include <algorithm>

#include "memory.h"

namespace jcoll {
namespace {

// Chunks and lanes begin on a cache line of the buffer where that costs nothing.
constexpr int64_t kLine = 64;
// What a lane touches should stay in the L2 cache while the plan runs.
constexpr int64_t kLaneFootprint = 1 << 20;
// A move costs about 50 ns beside its bytes; a core moves 1 KiB in as long.
constexpr int64_t kMinLaneNbytes = 4 << 10;
constexpr int64_t kLanesPerThread = 4;
// Of a plan that reads nothing it has written, a lane is only a piece of work.
constexpr int64_t kMaxLaneNbytes = 128 << 10;

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t RoundUp(int64_t a, int64_t unit) { return CeilDiv(a, unit) * unit; }

}  // namespace

void PlanRun::Begin(const PlanMoves* moves, const std::vector<RankBuffers>* ranks,
                    int64_t block_nbytes, ReduceFn reduce, int64_t element_nbytes,
                    int num_threads) {
  moves_ = moves;
  ranks_ = ranks;
  reduce_ = reduce;
  block_nbytes_ = block_nbytes;
  element_nbytes_ = element_nbytes;

  const int64_t parts = moves->chunks_per_block;
  chunk_nbytes_ = CeilDiv(block_nbytes / element_nbytes, parts) * element_nbytes;
  // Elements are of 1, 2, 4, 8 or 16 bytes: a line holds whole ones.
  if (chunk_nbytes_ >= kLine * parts) chunk_nbytes_ = RoundUp(chunk_nbytes_, kLine);

  const int64_t chunks =
      moves->num_ranks *
      ((int64_t{moves->in_blocks} + moves->out_blocks) * parts + moves->num_scratch);
  const bool rereads = std::any_of(moves->moves.begin(), moves->moves.end(),
                                   [](const PlanMoves::Move& m) { return !m.is_last; });
  const int64_t in_cache = rereads ? kLaneFootprint / std::max<int64_t>(1, chunks) : kMaxLaneNbytes;
  const int64_t share = CeilDiv(chunk_nbytes_, kLanesPerThread * num_threads);
  lane_nbytes_ = RoundUp(std::max(kMinLaneNbytes, std::min(in_cache, share)), kLine);
  stream_ = traffic_nbytes() >= kStreamThresholdBytes;
  num_lanes_ = static_cast<int>(CeilDiv(chunk_nbytes_, lane_nbytes_));
}

PlanRun::Range PlanRun::LaneOfPart(int lane, int part) const {
  const int64_t begin = std::min(part * chunk_nbytes_, block_nbytes_);
  const int64_t end = std::min(begin + chunk_nbytes_, block_nbytes_);
  const int64_t first = std::min(begin + lane * lane_nbytes_, end);
  return {first, std::min(first + lane_nbytes_, end)};
}

// Where the lane's bytes of a chunk are; `begin` is their place in the block.
char* PlanRun::At(const ChunkRef& c, int64_t begin, char* scratch) const {
  if (c.buffer == PlanBuffer::kScratch) {
    return scratch + (int64_t{c.rank} * moves_->num_scratch + c.chunk) * lane_nbytes_;
  }
  const RankBuffers& b = (*ranks_)[c.rank];
  const int64_t offset = c.chunk / moves_->chunks_per_block * block_nbytes_ + begin;
  // Inputs are only read: see PlanBuffer::kInput in DecodePlan.
  char* base = c.buffer == PlanBuffer::kInput ? static_cast<char*>(const_cast<void*>(b.inputs[0]))
                                              : static_cast<char*>(b.outputs[0]);
  return base + offset;
}

void PlanRun::RunLane(int lane) const {
  // Of this thread; grows to the largest plan once.
  thread_local std::vector<char> scratch;
  thread_local std::vector<const void*> srcs;
  thread_local std::vector<void*> dsts;
  const size_t scratch_nbytes =
      static_cast<size_t>(moves_->num_ranks) * moves_->num_scratch * lane_nbytes_;
  if (scratch.size() < scratch_nbytes) scratch.resize(scratch_nbytes);
  for (const PlanMoves::Move& m : moves_->moves) {
    const Range range = LaneOfPart(lane, m.part);
    const int64_t nbytes = range.end - range.begin;
    if (nbytes == 0) continue;
    dsts.clear();
    for (int i = 0; i < m.num_dsts; ++i) {
      dsts.push_back(At(moves_->dsts[m.first_dst + i], range.begin, scratch.data()));
    }
    srcs.clear();
    for (int i = 0; i < m.num_srcs; ++i) {
      srcs.push_back(At(moves_->srcs[m.first_src + i], range.begin, scratch.data()));
    }
    const bool stream = stream_ && m.is_last;
    if (m.num_srcs == 0) {
      for (void* dst : dsts) Zero(dst, nbytes, stream);
    } else if (m.num_srcs == 1) {
      CopyTo(srcs[0], dsts.data(), m.num_dsts, nbytes, stream);
    } else {
      reduce_(srcs.data(), m.num_srcs, dsts.data(), m.num_dsts, nbytes / element_nbytes_, stream);
    }
  }
}

}  // namespace jcoll
