// A plan whose ranks all live in one process, as one list of moves.
//
// The ranks' steps are brought into one order in which everything that a step reads is there: a
// receive comes after its send, and copies straight out of the sender's buffer. One thread that runs
// the list needs no synchronisation; threads share a collective by taking different *lanes*, the
// same range of bytes of every chunk (plan_run.h).
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "failure.h"
#include "plan.h"

namespace jcoll {

struct ChunkRef {
  int32_t rank;
  PlanBuffer buffer;
  int32_t chunk;
};

struct PlanMoves {
  // dst = the reduction of srcs[first_src .. first_src + num_srcs), in this order; a copy of one;
  // zeros of none. `part` tells the length: that of chunk number `part` of a block.
  struct Move {
    ChunkRef dst;
    int32_t part;
    int32_t first_src, num_srcs;
  };
  PlanOp op;
  int num_ranks = 1, chunks_per_block = 1, in_blocks = 1, out_blocks = 1, num_scratch = 0;
  bool reduces = false;
  std::vector<Move> moves;
  std::vector<ChunkRef> srcs;

  // Chunks read and written.
  int64_t traffic_chunks() const {
    return static_cast<int64_t>(moves.size()) + static_cast<int64_t>(srcs.size());
  }
};

// Fails for a plan that gets stuck, or that writes a chunk over a shorter one.
//
// A reduction whose result is only reduced further is joined with what follows it: one pass over
// memory and one rounding instead of several. Operands are ordered by rank, so that two ranks which
// reduce the same values get the same bits.
std::optional<Failure> MakeMoves(const Plan& plan, PlanMoves* moves);

}  // namespace jcoll
