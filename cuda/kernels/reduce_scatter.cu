// reduce_scatter: rank r reads block r of all inputs and reduces it.
//
// Phases    barrier; output[i] = input 0[r, i] + input 1[r, i] + ...; barrier.
// Layout    input = [block for rank 0 | block for rank 1 | ...].
// Barriers  The first: a peer's input is there when its kernel runs. The last: a rank may return,
//           and its program overwrite the input, only when all peers have read it.
// Bytes     (N-1)/N of an input read from peers by each rank.
// In place  The output may be block r of the input, which nobody else reads. They must not overlap
//           otherwise.
#include "cuda/kernels/reduce.cuh"
#include "cuda/kernels/signal.cuh"

namespace jcoll::gpu {
namespace {

template <typename S, typename Op>
__global__ void __launch_bounds__(kThreadsPerBlock, 1)
    ReduceScatter(const __grid_constant__ Args args) {
  const PeerTable& peers = args.peers;
  BlockSync sync(peers, args.op_id);
  if (sync.Barrier(Order::kData)) {
    S* output = static_cast<S*>(peers.output[peers.rank]);
    const int64_t first = peers.rank * args.count;
    Alignment alignment = AlignmentOfInputs<S>(peers, first);
    alignment.Add(output);
    ReduceRange<S, Op>(args, first, args.count, alignment,
                       [&](const auto& value, int64_t i) { Store(output + i, value); });
    sync.Barrier(Order::kReads);
  }
  sync.Leave(args.poison);
}

}  // namespace

cudaError_t LaunchReduceScatter(const Task& task, cudaStream_t stream) {
  return WithReduction(task, [&](auto storage, auto op) {
    using S = typename decltype(storage)::Type;
    using Op = typename decltype(op)::Type;
    return LaunchOn(stream, task.num_blocks, ReduceScatter<S, Op>, task.args);
  });
}

}  // namespace jcoll::gpu
