// all_reduce, one-shot: every rank reads all inputs and reduces them for itself.
//
// Phases    barrier; output[i] = input 0[i] + input 1[i] + ...; barrier.
// Barriers  The first: a peer's input is there when its kernel runs. The last: a rank may return,
//           and its program overwrite the input, only when all peers have read it.
// Bytes     (N-1) M read from peers by each rank.
// Needs     input and output of a rank not to overlap.
#include "cuda/kernels/reduce.cuh"
#include "cuda/kernels/signal.cuh"

namespace jcoll::gpu {
namespace {

template <typename S, typename Op>
__global__ void __launch_bounds__(kThreadsPerBlock, 1)
    AllReduceOneShot(const __grid_constant__ Args args) {
  BlockSync sync(args.peers, args.op_id);
  if (sync.Barrier(Order::kData)) {
    S* output = static_cast<S*>(args.peers.output[args.peers.rank]);
    Alignment alignment = AlignmentOfInputs<S>(args.peers, 0);
    alignment.Add(output);
    ReduceRange<S, Op>(args, 0, args.count, alignment,
                       [&](const auto& value, int64_t i) { Store(output + i, value); });
    sync.Barrier(Order::kReads);
  }
  sync.Leave(args.poison);
}

}  // namespace

cudaError_t LaunchAllReduceOneShot(const Task& task, cudaStream_t stream) {
  return WithReduction(task, [&](auto storage, auto op) {
    using S = typename decltype(storage)::Type;
    using Op = typename decltype(op)::Type;
    return LaunchOn(stream, task.num_blocks, AllReduceOneShot<S, Op>, task.args);
  });
}

}  // namespace jcoll::gpu
