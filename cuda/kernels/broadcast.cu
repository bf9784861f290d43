// broadcast, in the manner of the two-shot all_reduce: rank r fetches part r of the root's input,
// and stores each vector to all outputs as soon as it has it.
//
// Phases    barrier; parts, and on the root the copy to its own output; barrier.
// Barriers  The first: the root's input is there, and all outputs are free. The last: what peers
//           have stored is here when a rank returns, and all have read the root's input.
// Bytes     Of the root's link 2 (N-1)/N M, where reading it all by every rank would be (N-1) M.
//           The others read M/N from the root and store (N-2)/N M to each other.
// In place  The root's output may be its input. They must not overlap otherwise.
#include "cuda/kernels/copy.cuh"
#include "cuda/kernels/shards.cuh"
#include "cuda/kernels/signal.cuh"

namespace jcoll::gpu {
namespace {

// Stores this rank's part of the root's input to all outputs but the root's.
__device__ void SpreadPart(const Args& args) {
  const PeerTable& peers = args.peers;
  const Shard part = ShardOf(args.nbytes, 1, peers.rank, peers.num_ranks);
  const char* from = static_cast<const char*>(peers.input[args.root]) + part.begin;
  Alignment alignment(from);
  for (int p = 0; p < peers.num_ranks; ++p) {
    if (p != args.root) alignment.Add(static_cast<char*>(peers.output[p]) + part.begin);
  }
  CopyBytes(from, part.count, alignment, [&](const auto& value, int64_t i) {
    for (int turn = 0; turn < peers.num_ranks; ++turn) {
      const int p = PeerInTurn(peers, turn);
      if (p != args.root) Store(static_cast<char*>(peers.output[p]) + part.begin + i, value);
    }
  });
}

__global__ void __launch_bounds__(kThreadsPerBlock, 1)
    Broadcast(const __grid_constant__ Args args) {
  const PeerTable& peers = args.peers;
  BlockSync sync(peers, args.op_id);
  if (sync.Barrier(Order::kData)) {
    SpreadPart(args);
    if (peers.rank == args.root && peers.output[args.root] != peers.input[args.root]) {
      CopyBytesTo(peers.output[args.root], peers.input[args.root], args.nbytes);
    }
    sync.Barrier(Order::kData);
  }
  sync.Leave(args.poison);
}

}  // namespace

cudaError_t LaunchBroadcast(const Task& task, cudaStream_t stream) {
  return LaunchOn(stream, task.num_blocks, Broadcast, task.args);
}

}  // namespace jcoll::gpu
