// Whether all ranks of an all_reduce return the same bits.
//
// Addition of floats is not associative: ranks that add the same values in other orders get other
// bits. Of the steps of a plan jcoll/plan/bits.py asks it. Here it is asked of what is run: a
// partial sum may be folded into its user on one rank and, having two users, be kept on another.
//
// What is run is followed once on numbers: equal ones for what was reduced from equal operands in
// the same order.
#pragma once

#include <optional>

#include "plan.h"
#include "plan_moves.h"
#include "plan_values.h"
#include "shm/program.h"

namespace jcoll {

// An output chunk of a rank that is not added up as rank 0's is. Of other ops each result is one
// rank's.
std::optional<ChunkRef> DifferingBits(const Plan& plan, const PlanMoves& moves);
std::optional<ChunkRef> DifferingBits(const Plan& plan, const PlanPrograms& programs);

}  // namespace jcoll
