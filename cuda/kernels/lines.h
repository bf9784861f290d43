// The scratch memory of the kernels that exchange lines (LL): how much, and what lies where.
//
//   [block][half][source rank][kLinesPerBlock lines of 16 bytes]
//
// A block's lines belong to it for good, whatever is sent and in how many blocks: their flags are
// those of its own counter, SignalPad::line_epoch. Nothing else may write to this memory.
#pragma once

#include <cstdint>

namespace jcoll::gpu {

constexpr int kLineNbytes = 16, kLineDataNbytes = 8;
constexpr int kLinesPerBlock = 512;  // One for each thread.
constexpr int kMaxLineBlocks = 16;
constexpr int64_t kMaxLineMessageNbytes =
    int64_t{kMaxLineBlocks} * kLinesPerBlock * kLineDataNbytes;  // 64 KiB.

constexpr int64_t LineScratchNbytes(int num_ranks) {
  return int64_t{kMaxLineBlocks} * 2 * num_ranks * kLinesPerBlock * kLineNbytes;
}

}  // namespace jcoll::gpu
