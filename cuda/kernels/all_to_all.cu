// all_to_all: every rank stores block p of its input to its place in rank p's output.
//
// Phases    barrier; one block after another, each by the whole grid, one's own first; barrier.
// Layout    input = [block for rank 0 | block for rank 1 | ...], output = [block of rank 0 | ...].
// Barriers  The first: a peer's output is free when its kernel runs. The last: what peers have
//           stored is here when a rank returns.
// Bytes     (N-1)/N of the input stored to peers by each rank.
// Needs     input and output of a rank not to overlap: peers store to the output while the input is
//           read.
#include "cuda/kernels/copy.cuh"
#include "cuda/kernels/shards.cuh"
#include "cuda/kernels/signal.cuh"

namespace jcoll::gpu {
namespace {

__global__ void __launch_bounds__(kThreadsPerBlock, 1) AllToAll(const __grid_constant__ Args args) {
  const PeerTable& peers = args.peers;
  BlockSync sync(peers, args.op_id);
  if (sync.Barrier(Order::kData)) {
    const char* input = static_cast<const char*>(peers.input[peers.rank]);
    for (int turn = 0; turn < peers.num_ranks; ++turn) {
      const int p = PeerInTurn(peers, turn);
      char* output = static_cast<char*>(peers.output[p]);
      CopyBytesTo(output + peers.rank * args.nbytes, input + p * args.nbytes, args.nbytes);
    }
    sync.Barrier(Order::kData);
  }
  sync.Leave(args.poison);
}

}  // namespace

cudaError_t LaunchAllToAll(const Task& task, cudaStream_t stream) {
  return LaunchOn(stream, task.num_blocks, AllToAll, task.args);
}

}  // namespace jcoll::gpu
