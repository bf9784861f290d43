// What every rank of a plan does when its peers may live in other processes.
//
// A message is not sent anywhere: the sender puts the chunk into a *slot* of its staging area,
// which all processes map, and counts up; the receiver waits for the count and reads the slot. The
// programs of all ranks follow from the plan alone, so that every process knows where a peer's
// message number i lies. Three things are simplified:
//
//   - a value that is sent several times has one slot;
//   - what makes a value that is sent writes the slot too, in the same pass over memory;
//   - reductions into the same chunk, one after the other, are done at the last: one pass, and one
//     rounding for the 16-bit types. Operands are ordered by rank, as in plan_moves.h.
//
// What a slot holds often lies in one of the sender's buffers too, and stays there: its *origin*. A
// receiver that can read that needs no slot.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "../failure.h"
#include "../plan.h"

namespace jcoll {

struct RankProgram {
  static constexpr int32_t kNone = -1;

  // A chunk of this rank's buffers (rank == this rank, slot kNone) or a slot of another rank's.
  struct Operand {
    int32_t rank;
    int32_t slot;
    PlanBuffer buffer;
    int32_t chunk;
    int32_t message;  // The peer's messages that must have been counted: more than this.
  };
  // Local chunk and slot (either may be missing) = the reduction of the operands, a copy of one,
  // zeros of none. Then `num_posts` more messages are there.
  struct Action {
    std::vector<Operand> srcs;
    bool has_chunk = false;
    PlanBuffer buffer = PlanBuffer::kOutput;
    int32_t chunk = 0;
    int32_t slot = kNone;
    int32_t part = 0;  // The length is that of chunk number `part` of a block.
    int32_t num_posts = 0;
  };
  std::vector<Action> actions;
  // A chunk of INPUT, or one of OUTPUT that is written for good before the slot is posted.
  struct Origin {
    PlanBuffer buffer;
    int32_t chunk;
  };
  int32_t num_messages = 0;
  int32_t num_slots = 0;
  std::vector<std::optional<Origin>> origins;  // By slot.
  std::vector<int32_t> receivers;              // Other ranks that read this one's slots.
};

// The programs of a plan, and what is common to them.
struct PlanPrograms : PlanShape {
  int max_slots = 0;  // Of any rank.
  std::vector<RankProgram> ranks;
};

// Fails for a plan that gets stuck, or that writes a chunk over a shorter one.
std::optional<Failure> MakePrograms(const Plan& plan, PlanPrograms* programs);

// The same for Description::source_map: everybody stages what others need, and reads what it needs.
PlanPrograms MakePrograms(int num_ranks, int in_blocks, int out_blocks,
                          const std::vector<int64_t>& source_map);

}  // namespace jcoll
