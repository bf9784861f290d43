// all_reduce where NVLink's switch adds (NVLS, "multimem"), in one shot and in two.
//
// One-shot  barrier; every rank loads everything, reduced by the switch, to its output; barrier.
// Two-shot  barrier; rank r loads part r, reduced by the switch, and stores it to all outputs
//           through the switch; barrier.
// Barriers  The first: a peer's input is there, and its output free, when its kernel runs. The
//           last, one-shot: a rank may overwrite its input only when all have read it; two-shot:
//           what peers have stored is here when a rank returns.
// Bytes     Of each rank's link, one-shot: M in, and N M out, as every rank's load is answered from
//           all memories. Two-shot: M/N + M in and out.
// Edges     The switch works on 16 aligned bytes. Elements in front of and behind these, and all
//           where the buffers are not aligned alike, are reduced in the manner of the other
//           kernels.
// Results   The order in which the switch adds is its own: not bitwise those of the other kernels.
//           The two-shot result is the same on all ranks by construction, the one-shot's as far as
//           the switch adds alike for all. A mean of 16-bit floats is rounded twice.
// In place  Two-shot: as all_reduce_two_shot. One-shot: input and output must not overlap.
// Needs     sm_90, multicast addresses of the same place in all ranks' buffers, and a type and
//           operation that the switch has.
#include "cuda/kernels/multimem.cuh"
#include "cuda/kernels/reduce.cuh"
#include "cuda/kernels/shards.cuh"
#include "cuda/kernels/signal.cuh"

namespace jcoll::gpu {
namespace {

template <typename Op, typename V>
__device__ __forceinline__ void Divide(int32_t divisor, V* v) {
  JCOLL_UNROLL
  for (int e = 0; e < V::kSize; ++e) Narrow(Finish<Op>(Widen(v->e[e]), divisor), &v->e[e]);
}

// As ReduceRange, by the switch where that can be; `alignment` is of the multicast addresses too.
template <typename S, typename Op, typename F>
__device__ __forceinline__ void ReduceRangeInSwitch(const Args& args, int64_t first, int64_t count,
                                                    const Alignment& alignment, F store) {
  constexpr int kWays = 4;
  const bool wide = alignment.width() == kMaxVecNbytes;
  const int64_t head = wide ? alignment.head(kMaxVecNbytes) / int{sizeof(S)} : count;
  const S* input = static_cast<const S*>(args.peers.multicast_input) + first;
  DealVectors<S, kMaxVecNbytes / sizeof(S), kWays>(
      count, head, GridThread(), GridThreads(),
      [&](auto vector, auto ways, int64_t i, int64_t stride) {
        using V = typename decltype(vector)::Type;
        V result[decltype(ways)::value];
        if constexpr (V::kSize == 1) {
          ReduceRanks<S, Op>(args, first + i, stride, result);
        } else {
          JCOLL_UNROLL
          for (int w = 0; w < ways.value; ++w) {
            result[w] = multimem_ld_reduce<S, Op>(input + i + w * stride);
          }
          if (args.divisor != 1) {
            JCOLL_UNROLL
            for (int w = 0; w < ways.value; ++w) Divide<Op>(args.divisor, &result[w]);
          }
        }
        JCOLL_UNROLL
        for (int w = 0; w < ways.value; ++w) store(result[w], i + w * stride);
      });
}

template <typename S, typename Op>
__global__ void __launch_bounds__(kThreadsPerBlock, 1)
    AllReduceMultimemOneShot(const __grid_constant__ Args args) {
  const PeerTable& peers = args.peers;
  BlockSync sync(peers, args.op_id);
  if (sync.Barrier(Order::kData)) {
    S* output = static_cast<S*>(peers.output[peers.rank]);
    Alignment alignment = AlignmentOfInputs<S>(peers, 0);
    alignment.Add(peers.multicast_input);
    alignment.Add(output);
    ReduceRangeInSwitch<S, Op>(args, 0, args.count, alignment,
                               [&](const auto& value, int64_t i) { Store(output + i, value); });
    sync.Barrier(Order::kReads);
  }
  sync.Leave(args.poison);
}

template <typename S>
__device__ __forceinline__ void StoreToAll(const PeerTable& peers, int64_t at,
                                           const MultimemVec<S>& value) {
  multimem_st<S>(static_cast<S*>(peers.multicast_output) + at, value);
}
template <typename S>
__device__ __forceinline__ void StoreToAll(const PeerTable& peers, int64_t at,
                                           const Vec<S, 1>& value) {
  for (int turn = 0; turn < peers.num_ranks; ++turn) {
    Store(static_cast<S*>(peers.output[PeerInTurn(peers, turn)]) + at, value);
  }
}

template <typename S, typename Op>
__global__ void __launch_bounds__(kThreadsPerBlock, 1)
    AllReduceMultimemTwoShot(const __grid_constant__ Args args) {
  const PeerTable& peers = args.peers;
  BlockSync sync(peers, args.op_id);
  if (sync.Barrier(Order::kData)) {
    const Shard shard = ShardOf(args.count, sizeof(S), peers.rank, peers.num_ranks);
    Alignment alignment = AlignmentOfInputs<S>(peers, shard.begin);
    alignment.Add(static_cast<S*>(peers.multicast_input) + shard.begin);
    alignment.Add(static_cast<S*>(peers.multicast_output) + shard.begin);
    ReduceRangeInSwitch<S, Op>(
        args, shard.begin, shard.count, alignment,
        [&](const auto& value, int64_t i) { StoreToAll<S>(peers, shard.begin + i, value); });
    sync.Barrier(Order::kData);
  }
  sync.Leave(args.poison);
}

// Returns f(Tag<Storage>, Tag<Op>) for what the switch has.
template <typename F>
cudaError_t WithSwitchReduction(const Task& task, F f) {
  return WithReduction(task, [&](auto storage, auto op) {
    using S = typename decltype(storage)::Type;
    using Op = typename decltype(op)::Type;
    constexpr bool kWide = std::is_integral_v<S> && sizeof(S) >= 4;
    constexpr bool kSums = kWide || std::is_floating_point_v<S> || std::is_same_v<S, Float16> ||
                           std::is_same_v<S, BFloat16>;
    constexpr bool kExtreme = std::is_same_v<Op, Min> || std::is_same_v<Op, Max>;
    if constexpr ((std::is_same_v<Op, Sum> && kSums) || (kExtreme && kWide)) {
      return f(storage, op);
    } else {
      return cudaErrorInvalidValue;  // Refusal has it.
    }
  });
}

}  // namespace

cudaError_t LaunchAllReduceMultimemOneShot(const Task& task, cudaStream_t stream) {
  return WithSwitchReduction(task, [&](auto storage, auto op) {
    using S = typename decltype(storage)::Type;
    using Op = typename decltype(op)::Type;
    return LaunchOn(stream, task.num_blocks, AllReduceMultimemOneShot<S, Op>, task.args);
  });
}

cudaError_t LaunchAllReduceMultimemTwoShot(const Task& task, cudaStream_t stream) {
  return WithSwitchReduction(task, [&](auto storage, auto op) {
    using S = typename decltype(storage)::Type;
    using Op = typename decltype(op)::Type;
    return LaunchOn(stream, task.num_blocks, AllReduceMultimemTwoShot<S, Op>, task.args);
  });
}

}  // namespace jcoll::gpu
