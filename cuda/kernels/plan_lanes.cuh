// Where the bytes are that a block works on in one turn of a plan.
#pragma once

#include "cuda/kernels/language.cuh"
#include "cuda/kernels/launchers.h"

namespace jcoll::gpu {

// Bytes [begin, begin + nbytes) of a block of the op, and so of each chunk with this part.
struct LaneRange {
  int64_t begin, nbytes;
};

class PlanTurn {
 public:
  __device__ PlanTurn(const Args& args, int turn)
      : args_(args), lane_(int64_t{turn} * gridDim.x + blockIdx.x) {}

  // As ChunkCuts::Lane. Chunks of a short block, and the last lanes of a chunk, may be empty.
  __device__ LaneRange RangeOf(int part) const {
    const PlanLanes& lanes = args_.plan_lanes;
    const int64_t first = Least(part * lanes.chunk_nbytes, lanes.block_nbytes);
    const int64_t end = Least(first + lanes.chunk_nbytes, lanes.block_nbytes);
    const int64_t begin = Least(first + lane_ * lanes.lane_nbytes, end);
    return {begin, Least(begin + lanes.lane_nbytes, end) - begin};
  }

  // In block `index` of this rank's input, or of any rank's output.
  __device__ char* InBlock(void* buffer, int index, const LaneRange& range) const {
    return static_cast<char*>(buffer) + index * args_.plan_lanes.block_nbytes + range.begin;
  }
  __device__ char* Own(PlanPlace place, int index, const LaneRange& range) const {
    const PeerTable& peers = args_.peers;
    void* const buffer =
        place == PlanPlace::kInput ? peers.input[peers.rank] : peers.output[peers.rank];
    return InBlock(buffer, index, range);
  }

 private:
  __device__ static int64_t Least(int64_t a, int64_t b) { return a < b ? a : b; }

  const Args& args_;
  const int64_t lane_;
};

}  // namespace jcoll::gpu
