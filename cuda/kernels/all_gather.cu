// all_gather: every rank stores its input to its place in all outputs.
//
// Phases    barrier; each vector of the input is loaded once and stored to all outputs; barrier.
// Layout    output = [input of rank 0 | input of rank 1 | ...].
// Barriers  The first: a peer's output is free when its kernel runs. The last: what peers have
//           stored is here when a rank returns.
// Bytes     (N-1)/N of the output stored to peers by each rank.
// In place  The input may be its own place in the output. They must not overlap otherwise.
#include "cuda/kernels/copy.cuh"
#include "cuda/kernels/shards.cuh"
#include "cuda/kernels/signal.cuh"

namespace jcoll::gpu {
namespace {

__global__ void __launch_bounds__(kThreadsPerBlock, 1)
    AllGather(const __grid_constant__ Args args) {
  const PeerTable& peers = args.peers;
  BlockSync sync(peers, args.op_id);
  if (sync.Barrier(Order::kData)) {
    const void* input = peers.input[peers.rank];
    const int64_t offset = peers.rank * args.nbytes;
    Alignment alignment(input);
    for (int p = 0; p < peers.num_ranks; ++p) {
      alignment.Add(static_cast<char*>(peers.output[p]) + offset);
    }
    CopyBytes(input, args.nbytes, alignment, [&](const auto& value, int64_t i) {
      for (int turn = 0; turn < peers.num_ranks; ++turn) {
        Store(static_cast<char*>(peers.output[PeerInTurn(peers, turn)]) + offset + i, value);
      }
    });
    sync.Barrier(Order::kData);
  }
  sync.Leave(args.poison);
}

}  // namespace

cudaError_t LaunchAllGather(const Task& task, cudaStream_t stream) {
  return LaunchOn(stream, task.num_blocks, AllGather, task.args);
}

}  // namespace jcoll::gpu
