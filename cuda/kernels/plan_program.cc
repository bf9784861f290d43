// How calls by plans are dealt to blocks, what memory that takes, and which calls are served.
#include "cuda/kernels/plan_program.h"

#include <algorithm>
#include <string>

#include "csrc/chunk_cuts.h"
#include "cuda/kernels/lines.h"
#include "cuda/kernels/plan_scratch.h"

namespace jcoll::gpu {
namespace {

// A call by lines moves twice the bytes and saves, for each message, the fence and the round trip
// of a counter. By NCCL's table for NVLink (src/graph/tuning.cc: 0.6 us a hop for LL, 3.4 us for
// Simple) that is worth 2.8 us, in which a link moves several hundred KB; but lines are stored at
// no more than half a link's rate. Not measured by us.
constexpr int64_t kMaxLineChunkNbytes = 64 << 10;

// Where a block's lanes begin: on the granules of NVLink's packets, or on a line.
constexpr int64_t kLaneUnit = 128;

const PlanProgram::Variant& VariantOf(const Call& call) {
  return call.kernel == Kernel::kPlanLL ? call.program->ll : call.program->simple;
}

int64_t ChunkNbytes(const Call& call) {
  return ChunkCuts(call.count * Size(call.dtype), Size(call.dtype), call.program->chunks_per_block)
      .chunk_nbytes();
}

// A lane's largest size, with which a turn's slots fill what a block has for them.
int64_t MaxLaneNbytes(const Call& call) {
  const int64_t num_slots = std::max(VariantOf(call).num_slots, 1);
  if (call.kernel == Kernel::kPlanLL) return kPlanLinesPerTurn / num_slots * kLineDataNbytes;
  return kPlanNbytesPerTurn / num_slots / kLaneUnit * kLaneUnit;
}

std::string Text(int64_t value) { return std::to_string(value); }

// How often each block runs the program.
int64_t NumTurns(const PlanLanes& lanes, int num_blocks) {
  return CeilDiv(CeilDiv(lanes.chunk_nbytes, lanes.lane_nbytes), num_blocks);
}

}  // namespace

bool IsPlan(Kernel kernel) { return kernel == Kernel::kPlanSimple || kernel == Kernel::kPlanLL; }

PlanCode CodeOf(const Call& call) {
  const PlanProgram::Rank& rank = VariantOf(call).ranks[call.peers.rank];
  const auto* image = static_cast<const int32_t*>(call.program_image);
  const auto find = [image](const PlanProgram::Part& part, auto** records) {
    using Record = std::remove_pointer_t<std::remove_reference_t<decltype(*records)>>;
    *records = reinterpret_cast<Record*>(image + part.first_word);
  };
  PlanCode code;
  find(rank.actions, &code.actions);
  find(rank.sources, &code.sources);
  find(rank.targets, &code.targets);
  find(rank.posts, &code.posts);
  find(rank.senders, &code.senders);
  find(rank.receivers, &code.receivers);
  code.num_actions = rank.actions.size;
  code.num_senders = rank.senders.size;
  code.num_receivers = rank.receivers.size;
  return code;
}

PlanLanes LanesOf(const Call& call, int num_blocks) {
  const PlanProgram::Variant& variant = VariantOf(call);
  PlanLanes lanes;
  lanes.block_nbytes = call.count * Size(call.dtype);
  lanes.chunk_nbytes = ChunkNbytes(call);
  lanes.num_slots = variant.num_slots;
  lanes.ticks_per_turn = static_cast<uint32_t>(variant.num_messages) + 1;
  const int64_t unit = call.kernel == Kernel::kPlanLL ? kLineDataNbytes : kLaneUnit;
  const int64_t share = RoundUp(CeilDiv(lanes.chunk_nbytes, num_blocks), unit);
  lanes.lane_nbytes = std::min(std::max(share, unit), MaxLaneNbytes(call));
  lanes.num_turns = static_cast<int32_t>(NumTurns(lanes, num_blocks));
  return lanes;
}

int PlanBlocksFor(const Call& call, const DeviceFacts& device) {
  // So much of a chunk gives every thread of a block a vector, or a line.
  const bool is_ll = call.kernel == Kernel::kPlanLL;
  const int64_t per_block = is_ll ? kLinesPerBlock * kLineDataNbytes : 8 << 10;
  const int64_t most = is_ll ? kMaxLineBlocks : std::min(kMaxBlocks, device.num_sms);
  return static_cast<int>(std::clamp<int64_t>(CeilDiv(ChunkNbytes(call), per_block), 1, most));
}

int64_t PlanScratchNbytes(const Call& call, int num_blocks) {
  if (call.kernel == Kernel::kPlanLL) return kPlanLineScratchNbytes;
  const PlanLanes lanes = LanesOf(call, num_blocks);
  return int64_t{num_blocks} * 2 * lanes.num_slots * lanes.lane_nbytes;
}

std::optional<std::string> ProgramRefusal(const Call& call) {
  if (call.program == nullptr) return "needs the program of a plan, and the call has none";
  if (call.program->num_ranks != call.peers.num_ranks) {
    return "got a plan for " + Text(call.program->num_ranks) + " ranks, not " +
           Text(call.peers.num_ranks);
  }
  if (call.reduce_op == ReduceOp::kMean) {
    return "has no mean: a plan reduces in several steps, and its sum is to be divided afterwards";
  }
  return std::nullopt;
}

std::optional<std::string> PlanSizesRefusal(const Call& call) {
  if (MaxLaneNbytes(call) == 0) {
    const bool is_ll = call.kernel == Kernel::kPlanLL;
    return "has room for " + Text(is_ll ? kPlanLinesPerTurn : kPlanNbytesPerTurn / kLaneUnit) +
           " values that a rank is sent, and the plan has " + Text(VariantOf(call).num_slots);
  }
  const int num_blocks = call.num_blocks > 0 ? call.num_blocks : PlanBlocksFor(call, {});
  if (call.kernel == Kernel::kPlanLL) {
    if (ChunkNbytes(call) > kMaxLineChunkNbytes) {
      return "serves chunks of up to " + Text(kMaxLineChunkNbytes) + " bytes, not " +
             Text(ChunkNbytes(call));
    }
    if (num_blocks > kMaxLineBlocks) {
      return "runs in at most " + Text(kMaxLineBlocks) + " thread blocks, not " + Text(num_blocks);
    }
    return std::nullopt;
  }
  const PlanLanes lanes = LanesOf(call, num_blocks);
  // The counter of a block must not get so far that ">=" is taken for "<".
  if (NumTurns(lanes, num_blocks) < INT32_MAX / lanes.ticks_per_turn) return std::nullopt;
  return "would count more than 2^31 messages for " + Text(lanes.block_nbytes) + " bytes";
}

}  // namespace jcoll::gpu
