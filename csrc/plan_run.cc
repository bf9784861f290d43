#include "plan_run.h"

#include <algorithm>

#include "memory.h"

namespace jcoll {
namespace {

// What a lane touches should stay in the L2 cache while the plan runs.
constexpr int64_t kLaneFootprint = 1 << 20;
// A move costs about 50 ns beside its bytes; a core moves 1 KiB in as long.
constexpr int64_t kMinLaneNbytes = 4 << 10;
constexpr int64_t kLanesPerThread = 4;
// Of a plan that reads nothing it has written, a lane is only a piece of work.
constexpr int64_t kMaxLaneNbytes = 128 << 10;

}  // namespace

void PlanRun::Begin(const PlanMoves* moves, const std::vector<RankBuffers>* ranks,
                    int64_t block_nbytes, ReduceFn reduce, int64_t element_nbytes,
                    int num_threads) {
  moves_ = moves;
  ranks_ = ranks;
  reduce_ = reduce;
  element_nbytes_ = element_nbytes;
  cuts_ = ChunkCuts(block_nbytes, element_nbytes, moves->chunks_per_block);

  const int64_t chunks = moves->num_ranks * ((int64_t{moves->in_blocks} + moves->out_blocks) *
                                                 moves->chunks_per_block +
                                             moves->num_scratch);
  const int64_t in_cache =
      moves->rereads ? kLaneFootprint / std::max<int64_t>(1, chunks) : kMaxLaneNbytes;
  const int64_t share = CeilDiv(cuts_.chunk_nbytes(), kLanesPerThread * num_threads);
  lane_nbytes_ = RoundUp(std::max(kMinLaneNbytes, std::min(in_cache, share)), kLineNbytes);
  stream_ = ShouldStream(traffic_nbytes(), moves->reduces, moves->fans_out);
  num_lanes_ = static_cast<int>(CeilDiv(cuts_.chunk_nbytes(), lane_nbytes_));
}

// Where the lane's bytes of a chunk are; `begin` is their place in the block.
char* PlanRun::At(const ChunkRef& c, int64_t begin, char* scratch) const {
  if (c.buffer == PlanBuffer::kScratch) {
    return scratch + (int64_t{c.rank} * moves_->num_scratch + c.chunk) * lane_nbytes_;
  }
  return cuts_.At((*ranks_)[c.rank], c.buffer, c.chunk, begin);
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
    const ChunkCuts::Range range = cuts_.Lane(m.part, lane, lane_nbytes_);
    if (range.nbytes() == 0) continue;
    dsts.clear();
    for (int i = 0; i < m.num_dsts; ++i) {
      dsts.push_back(At(moves_->dsts[m.first_dst + i], range.begin, scratch.data()));
    }
    srcs.clear();
    for (int i = 0; i < m.num_srcs; ++i) {
      srcs.push_back(At(moves_->srcs[m.first_src + i], range.begin, scratch.data()));
    }
    Transfer(srcs.data(), m.num_srcs, dsts.data(), m.num_dsts, range.nbytes(), reduce_,
             element_nbytes_, stream_ && m.is_last);
  }
}

}  // namespace jcoll
