// A plan, by the Simple protocol: data, fence, counter.
//
// Phases    barrier; for each turn, the actions of this rank's program in their order: wait for
//           what the peers count, reduce or copy, store to all targets, count.
// Layout    plan_scratch.h, plan_program.h. A value that its receiver keeps goes straight into its
//           output.
// Barrier   The peers' kernels run: their outputs and slots are free.
// Counters  A block counts its messages, and the turns it has left, on from its epoch, in the
//           peers' inboxes of the barrier. All ranks count the same ticks for a launch, and every
//           launch begins with a barrier of all, so that no count ever gets so old that ">=" fails.
// Reuse     A slot is written once in a turn, and again two turns later: for that, the sender waits
//           until its receivers have left the turn in which they read it. What a rank is sent it
//           waits for, so that nothing is on its way to it when it leaves the last turn.
// Bytes     What the plan sends, stored to peers by each rank; nothing is read from them.
// In place  No: an input may be read after outputs are written.
#include "cuda/kernels/plan_lanes.cuh"
#include "cuda/kernels/plan_types.cuh"
#include "cuda/kernels/signal.cuh"

namespace jcoll::gpu {
namespace {

// One action of a turn, done by the threads of the block.
template <typename S, typename Op>
class ActionRun {
 public:
  __device__ ActionRun(const Args& args, int turn, const PlanAction& action)
      : args_(args),
        turn_(args, turn),
        action_(action),
        range_(turn_.RangeOf(action.part)),
        first_slot_((int64_t{blockIdx.x} * 2 + turn % 2) * args.plan_lanes.num_slots) {}

  __device__ void Run() const {
    constexpr int kElements = kMaxVecNbytes / sizeof(S);
    // All that is read is in this GPU's memory, and mostly two operands.
    constexpr int kWays = sizeof(S) == 1 ? 1 : 2;
    const int64_t count = range_.nbytes / static_cast<int64_t>(sizeof(S));
    if (count == 0 || action_.num_targets == 0) return;
    // Where the addresses do not agree, elements go one by one.
    const Alignment alignment = FindAlignment();
    const bool wide = alignment.width() == kMaxVecNbytes;
    const int64_t head = wide ? alignment.head(kMaxVecNbytes) / int{sizeof(S)} : count;
    DealVectors<S, kElements, kWays>(count, head, threadIdx.x, blockDim.x,
                                     [&](auto vector, auto ways, int64_t i, int64_t stride) {
                                       using V = typename decltype(vector)::Type;
                                       V result[decltype(ways)::value];
                                       Compute(i, stride, result);
                                       for (int t = 0; t < action_.num_targets; ++t) {
                                         S* target = Target(t) + i;
                                         JCOLL_UNROLL
                                         for (int w = 0; w < ways.value; ++w)
                                           Store(target + w * stride, result[w]);
                                       }
                                     });
  }

 private:
  template <typename V, int kWays>
  __device__ __forceinline__ void Compute(int64_t at, int64_t stride, V (&result)[kWays]) const {
    if constexpr (!std::is_same_v<Op, Copy>) {
      if (action_.num_sources > 1) {
        ReduceSources<S, Op, 2 * kWays>(
            action_.num_sources, [&](int k) { return Source(k); }, at, stride, 1, result);
        return;
      }
    }
    JCOLL_UNROLL
    for (int w = 0; w < kWays; ++w) {
      result[w] = action_.num_sources == 0 ? V() : Load<V>(Source(0) + at + w * stride);
    }
  }

  __device__ Alignment FindAlignment() const {
    Alignment alignment(Target(0));
    for (int t = 1; t < action_.num_targets; ++t) alignment.Add(Target(t));
    for (int s = 0; s < action_.num_sources; ++s) alignment.Add(Source(s));
    return alignment;
  }

  __device__ const S* Source(int k) const {
    const PlanSource& source = args_.plan.sources[action_.first_source + k];
    return reinterpret_cast<const S*>(source.place == PlanPlace::kSlot
                                          ? Slot(args_.peers.rank, source.index)
                                          : turn_.Own(source.place, source.index, range_));
  }
  __device__ S* Target(int k) const {
    const PlanTarget& target = args_.plan.targets[action_.first_target + k];
    void* const output = args_.peers.output[target.rank];
    return reinterpret_cast<S*>(target.place == PlanPlace::kSlot
                                    ? Slot(target.rank, target.index)
                                    : turn_.InBlock(output, target.index, range_));
  }
  __device__ char* Slot(int rank, int index) const {
    const int64_t number = first_slot_ + index;
    return static_cast<char*>(args_.peers.scratch[rank]) + number * args_.plan_lanes.lane_nbytes;
  }

  const Args& args_;
  const PlanTurn turn_;
  const PlanAction& action_;
  const LaneRange range_;
  const int64_t first_slot_;
};

// The peers' messages that an action reads, by one thread.
__device__ bool AwaitSources(const PlanCode& plan, const PlanAction& action, uint32_t ticks,
                             BlockSync* sync) {
  for (int s = 0; s < action.num_sources; ++s) {
    const PlanSource& source = plan.sources[action.first_source + s];
    if (source.peer == PlanSource::kNobody) continue;
    const uint32_t messages = static_cast<uint32_t>(source.messages);
    if (!sync->AwaitTick(source.peer, ticks + messages, Order::kData)) return false;
  }
  return true;
}

// Until all receivers have left turn - 2. By all threads of the block.
__device__ bool AwaitSlots(const PlanCode& plan, int turn, uint32_t ticks_per_turn,
                           BlockSync* sync) {
  if (turn < 2) return true;
  bool free = true;
  for (int r = threadIdx.x; r < plan.num_receivers; r += blockDim.x) {
    const uint32_t ticks = static_cast<uint32_t>(turn - 1) * ticks_per_turn;
    free = free && sync->AwaitTick(plan.receivers[r], ticks, Order::kReads);
  }
  return sync->Agree(free);
}

template <typename S, typename Op>
__device__ bool RunTurn(const Args& args, int turn, BlockSync* sync) {
  const PlanCode& plan = args.plan;
  const uint32_t ticks_per_turn = args.plan_lanes.ticks_per_turn;
  const uint32_t ticks = static_cast<uint32_t>(turn) * ticks_per_turn;
  if (!AwaitSlots(plan, turn, ticks_per_turn, sync)) return false;
  for (int i = 0; i < plan.num_actions; ++i) {
    const PlanAction action = plan.actions[i];
    const bool is_there = threadIdx.x != 0 || AwaitSources(plan, action, ticks, sync);
    // Also for what other threads of the block have stored.
    if (!sync->Agree(is_there)) return false;
    ActionRun<S, Op>(args, turn, action).Run();
    if (action.num_posts == 0) continue;
    __syncthreads();
    for (int p = threadIdx.x; p < action.num_posts; p += blockDim.x) {
      const PlanPost& post = plan.posts[action.first_post + p];
      sync->Tick(post.peer, ticks + static_cast<uint32_t>(post.messages), Order::kData);
    }
  }
  __syncthreads();
  for (int s = threadIdx.x; s < plan.num_senders; s += blockDim.x) {
    // kData, as it may be what a peer sees in place of the last messages.
    sync->Tick(plan.senders[s], ticks + ticks_per_turn, Order::kData);
  }
  return true;
}

template <typename S, typename Op>
__global__ void __launch_bounds__(kThreadsPerBlock, 1)
    PlanSimple(const __grid_constant__ Args args) {
  BlockSync sync(args.peers, args.op_id);
  if (sync.Barrier(Order::kData)) {
    const PlanLanes& lanes = args.plan_lanes;
    int turn = 0;
    while (turn < lanes.num_turns && RunTurn<S, Op>(args, turn, &sync)) ++turn;
    sync.Advance(static_cast<uint32_t>(lanes.num_turns) * lanes.ticks_per_turn);
  }
  sync.Leave(args.poison);
}

}  // namespace

cudaError_t LaunchPlanSimple(const Task& task, cudaStream_t stream) {
  return WithPlanTypes(task, [&](auto storage, auto op) {
    using S = typename decltype(storage)::Type;
    using Op = typename decltype(op)::Type;
    return LaunchOn(stream, task.num_blocks, PlanSimple<S, Op>, task.args);
  });
}

}  // namespace jcoll::gpu
