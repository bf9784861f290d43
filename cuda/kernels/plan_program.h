// Plans on GPUs: what the two interpreters (plan_simple.cu, plan_ll.cu) are given instead of a
// plan.
//
// It is made from the programs that ranks in several processes follow on CPU (csrc/shm/program.h):
// the same actions with the same operands in the same order, so that sums have the same bits as
// there. (Where all ranks of a CPU program are in one process, partial sums are folded away, and
// 16-bit floats rounded less often.) Three things differ:
//
//   - data are pushed: who makes a value stores it into a slot of each rank that takes it;
//   - what nobody reads before it is overwritten is not stored;
//   - by the Simple protocol, a value that its receiver only keeps goes straight to where it stays,
//     in the receiver's output.
//
// A slot is written once in a turn (below), so that a turn needs no order among its messages.
#pragma once

#include <cstdint>
#include <vector>

#include "csrc/shm/program.h"
#include "cuda/kernels/launch.h"

namespace jcoll::gpu {

// ---- What kernels read. Plain data; the order of the fields is that of the words in an image.

enum class PlanPlace : int32_t { kInput, kOutput, kSlot };

// An operand of an action: a block of an own buffer, at the action's part; or a slot.
struct PlanSource {
  static constexpr int32_t kNobody = -1;
  PlanPlace place;
  int32_t index;     // Of the block or slot.
  int32_t peer;      // Who stores it there; kNobody: this rank did.
  int32_t messages;  // Of the peer's in this turn: so many must have been counted.
};
// Where a result goes.
struct PlanTarget {
  int32_t rank;
  PlanPlace place;
  int32_t index;
};
// `peer` may see that `messages` of this rank's have come.
struct PlanPost {
  int32_t peer;
  int32_t messages;
};
// All targets = the reduction of the sources; a copy of one; zeros of none. Then the posts.
struct PlanAction {
  int32_t part;  // The length, and the place in a block, are those of chunk number `part`.
  int32_t first_source, num_sources;
  int32_t first_target, num_targets;
  int32_t first_post, num_posts;
};

// One rank's program, in device memory.
struct PlanCode {
  const PlanAction* actions = nullptr;
  const PlanSource* sources = nullptr;
  const PlanTarget* targets = nullptr;
  const PlanPost* posts = nullptr;
  const int32_t* senders = nullptr;    // Who stores to this rank,
  const int32_t* receivers = nullptr;  // and to whom this one does.
  int32_t num_actions = 0, num_senders = 0, num_receivers = 0;
};

// How the bytes of a call are dealt to blocks. Every chunk is cut into lanes alike; in turn t block
// b runs the whole program on lane t * num_blocks + b. The same on all ranks.
struct PlanLanes {
  int64_t block_nbytes = 0;  // Of a block of the op; what csrc/chunk_cuts.h calls so.
  int64_t chunk_nbytes = 0;
  int64_t lane_nbytes = 0;
  int32_t num_turns = 0;
  int32_t num_slots = 0;  // A rank's, in one turn of one block; the most of any rank.
  // More than any rank's messages in a turn.
  uint32_t ticks_per_turn = 0;
};

// ---- What the host keeps of a plan: for all ranks, as each needs to know where others' slots are.

enum class PlanProtocol { kSimple, kLL };

struct PlanProgram : PlanShape {
  struct Part {
    int32_t first_word = 0, size = 0;
  };
  struct Rank {
    Part actions, sources, targets, posts, senders, receivers;
  };
  struct Variant {
    std::vector<Rank> ranks;
    int32_t num_slots = 0, num_messages = 0;  // The most of any rank.
  };
  Variant simple, ll;
  // By rank: what has to lie in the memory of its device, for Call::program_image.
  std::vector<std::vector<int32_t>> images;
};

PlanProgram CompilePlan(const PlanPrograms& programs);

// ---- For launch.cc and refusal.cc.

bool IsPlan(Kernel kernel);
// As Refusal: whether the call has a program for so many ranks, which all that follows needs.
std::optional<std::string> ProgramRefusal(const Call& call);
// The same for its sizes.
std::optional<std::string> PlanSizesRefusal(const Call& call);
PlanCode CodeOf(const Call& call);
PlanLanes LanesOf(const Call& call, int num_blocks);
int PlanBlocksFor(const Call& call, const DeviceFacts& device);
int64_t PlanScratchNbytes(const Call& call, int num_blocks);

}  // namespace jcoll::gpu
