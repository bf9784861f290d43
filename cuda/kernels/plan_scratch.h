// The scratch memory of the interpreters of plans: how much, and what lies where.
//
// A block has room for the slots of two turns, which it uses in turn: while peers still read those
// of the turn before, their values of this turn have a place. Nothing else may write to this
// memory.
//
//   Simple  [block][half][slot][lane_nbytes]: laid out anew for every launch. At its beginning all
//           ranks have left the one before.
//   LL      [block][half][slot][lane in lines]: a half always has kPlanLinesPerTurn lines, as peers
//           may be in another launch, and its flags are those of one counter.
#pragma once

#include <cstdint>

#include "cuda/kernels/lines.h"

namespace jcoll::gpu {

// Of a block in one turn. A ring over 8 ranks has 7 slots: lanes of 36 KiB, or 4 to 5 vectors of 16
// bytes for each thread, between two waits.
constexpr int64_t kPlanNbytesPerTurn = 256 << 10;
constexpr int64_t kPlanLinesPerTurn = 4096;
constexpr int64_t kPlanLineScratchNbytes =
    int64_t{kMaxLineBlocks} * 2 * kPlanLinesPerTurn * kLineNbytes;  // 2 MiB.

}  // namespace jcoll::gpu
