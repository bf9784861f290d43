// One collective done by a plan, with all its ranks in this process.
//
// The bytes of every chunk are cut into lanes: lane l is bytes [l * lane_nbytes, (l + 1) *
// lane_nbytes) of each chunk. A lane runs the whole plan on its bytes, on one thread, and shares
// nothing with the others. A lane's part of all buffers fits in the L2 cache, so that a value which
// the plan passes on from rank to rank is read from memory once.
#pragma once

#include <cstdint>
#include <vector>

#include "chunk_cuts.h"
#include "moves.h"
#include "plan_moves.h"
#include "reduce.h"

namespace jcoll {

class PlanRun {
 public:
  // `moves` and `ranks` outlive the run. `reduce` is needed by plans that reduce; else null, with
  // an element of one byte.
  void Begin(const PlanMoves* moves, const std::vector<RankBuffers>* ranks, int64_t block_nbytes,
             ReduceFn reduce, int64_t element_nbytes, int num_threads);

  int64_t traffic_nbytes() const { return moves_->traffic_chunks() * cuts_.chunk_nbytes(); }
  int num_lanes() const { return num_lanes_; }
  void RunLane(int lane) const;

 private:
  char* At(const ChunkRef& c, int64_t begin, char* scratch) const;

  const PlanMoves* moves_ = nullptr;
  const std::vector<RankBuffers>* ranks_ = nullptr;
  ReduceFn reduce_ = nullptr;
  int64_t element_nbytes_ = 1;
  ChunkCuts cuts_;
  int64_t lane_nbytes_ = 1;
  int num_lanes_ = 0;
  bool stream_ = false;
};

}  // namespace jcoll
