// Where the chunks of a plan lie in a rank's buffers. All executors, and so all processes of a
// collective, must come to the same cuts: this is the one place that makes them.
#pragma once

#include <algorithm>
#include <cstdint>

#include "align.h"
#include "moves.h"
#include "plan.h"

namespace jcoll {

class ChunkCuts {
 public:
  struct Range {
    int64_t begin, end;  // Of a block, in bytes.
    int64_t nbytes() const { return end - begin; }
  };

  ChunkCuts() = default;
  // Chunks begin on a cache line of the block where that costs nothing.
  ChunkCuts(int64_t block_nbytes, int64_t element_nbytes, int chunks_per_block)
      : block_nbytes_(block_nbytes), chunks_per_block_(chunks_per_block) {
    chunk_nbytes_ = CeilDiv(block_nbytes / element_nbytes, chunks_per_block) * element_nbytes;
    if (chunk_nbytes_ >= kLineNbytes * chunks_per_block) {
      chunk_nbytes_ = RoundUp(chunk_nbytes_, kLineNbytes);
    }
  }

  // Of all chunks but the last ones of a block, which may be shorter, or empty.
  int64_t chunk_nbytes() const { return chunk_nbytes_; }

  // Bytes [lane * lane_nbytes, (lane + 1) * lane_nbytes) of chunk number `part` of a block.
  Range Lane(int part, int64_t lane, int64_t lane_nbytes) const {
    const int64_t begin = std::min(part * chunk_nbytes_, block_nbytes_);
    const int64_t end = std::min(begin + chunk_nbytes_, block_nbytes_);
    const int64_t first = std::min(begin + lane * lane_nbytes, end);
    return {first, std::min(first + lane_nbytes, end)};
  }

  // Where byte `begin` of the block that a chunk of INPUT or OUTPUT belongs to is in its buffer.
  int64_t Offset(int chunk, int64_t begin) const {
    return chunk / chunks_per_block_ * block_nbytes_ + begin;
  }

  // Its address. Inputs are only read: DecodePlan has checked that nothing writes them.
  char* At(const RankBuffers& b, PlanBuffer buffer, int chunk, int64_t begin) const {
    char* base = buffer == PlanBuffer::kInput ? static_cast<char*>(const_cast<void*>(b.inputs[0]))
                                              : static_cast<char*>(b.outputs[0]);
    return base + Offset(chunk, begin);
  }

 private:
  int64_t block_nbytes_ = 0, chunk_nbytes_ = 0;
  int chunks_per_block_ = 1;
};

}  // namespace jcoll
