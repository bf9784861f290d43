// A plan whose ranks all live in one process, as one list of moves.
//
// The ranks' steps are brought into one order in which everything that a step reads is there: a
// receive comes after its send, and copies straight out of the sender's buffer. One thread that
// runs the list needs no synchronisation; threads share a collective by taking different *lanes*,
// the same range of bytes of every chunk (plan_run.h).
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "failure.h"
#include "plan_values.h"

namespace jcoll {

struct PlanMoves : PlanShape {
  // dsts[first_dst ..] = the reduction of srcs[first_src ..], in this order; a copy of one; zeros
  // of none. `part` tells the length: that of chunk number `part` of a block.
  struct Move {
    int32_t part;
    int32_t first_src, num_srcs;
    int32_t first_dst, num_dsts;
    bool is_last;  // No other move reads what it writes.
  };
  std::vector<Move> moves;
  std::vector<ChunkRef> srcs, dsts;
  bool rereads = false;   // Some move reads what another has written.
  bool fans_out = false;  // Some move writes the same to several places.

  // Chunks read and written.
  int64_t traffic_chunks() const { return static_cast<int64_t>(srcs.size() + dsts.size()); }
};

// Fails for a plan that gets stuck, or that writes a chunk over a shorter one. The operands of a
// reduction are ordered by rank, so that two ranks which reduce the same values get the same bits.
// `simplify`: as PlanValues does. Else every operation is one of the plan's.
std::optional<Failure> MakeMoves(const Plan& plan, PlanMoves* moves, bool simplify = true);

}  // namespace jcoll
