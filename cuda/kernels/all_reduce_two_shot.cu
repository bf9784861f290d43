// all_reduce, two-shot in one go: the owner of a part reduces it and stores it to all outputs.
//
// Phases    barrier; rank r reduces part r of all inputs, and stores each vector of the result to
//           the output of every rank as soon as it has it; barrier.
// Barriers  The first: a peer's input is there, and its output free, when its kernel runs. The
//           last: what peers have stored is here when a rank returns. There is none between the
//           shots, as no rank reads what another one has reduced.
// Bytes     (N-1)/N M read from peers and as much stored to them by each rank.
// In place  An element of the inputs is read by one thread only, which then overwrites it: input
//           and output may be the same buffer. They must not overlap otherwise.
#include "cuda/kernels/reduce.cuh"
#include "cuda/kernels/shards.cuh"
#include "cuda/kernels/signal.cuh"

namespace jcoll::gpu {
namespace {

template <typename S, typename Op>
__global__ void __launch_bounds__(kThreadsPerBlock, 1)
    AllReduceTwoShot(const __grid_constant__ Args args) {
  const PeerTable& peers = args.peers;
  BlockSync sync(peers, args.op_id);
  if (sync.Barrier(Order::kData)) {
    const Shard shard = ShardOf(args.count, sizeof(S), peers.rank, peers.num_ranks);
    Alignment alignment = AlignmentOfInputs<S>(peers, shard.begin);
    for (int p = 0; p < peers.num_ranks; ++p) {
      alignment.Add(static_cast<S*>(peers.output[p]) + shard.begin);
    }
    ReduceRange<S, Op>(args, shard.begin, shard.count, alignment,
                       [&](const auto& value, int64_t i) {
                         for (int turn = 0; turn < peers.num_ranks; ++turn) {
                           S* output = static_cast<S*>(peers.output[PeerInTurn(peers, turn)]);
                           Store(output + shard.begin + i, value);
                         }
                       });
    sync.Barrier(Order::kData);
  }
  sync.Leave(args.poison);
}

}  // namespace

cudaError_t LaunchAllReduceTwoShot(const Task& task, cudaStream_t stream) {
  return WithReduction(task, [&](auto storage, auto op) {
    using S = typename decltype(storage)::Type;
    using Op = typename decltype(op)::Type;
    return LaunchOn(stream, task.num_blocks, AllReduceTwoShot<S, Op>, task.args);
  });
}

}  // namespace jcoll::gpu
