// ragged_all_to_all as jax.lax defines it: the sender knows where in the receiver's output its rows
// go, so that no counts are exchanged, and the host need not know any.
//
// Phases    barrier; the offsets and sizes are checked; rows are stored to the peers' outputs, one
//           update after another, each by the whole grid; barrier.
// Layout    The updates for rank p are numbers [p U, (p+1) U) of the offsets and sizes, with
//           U = updates_per_rank. Rows that nobody sends keep what the output has. Nobody
//           needs jax.lax's recv_sizes.
// Barriers  The first: a peer's output is there and free when its kernel runs. The last: what peers
//           have stored is here when a rank returns.
// Bytes     The rows that a rank sends to others, stored to peers.
// Errors    Rows outside of the sender's input or the receiver's output: nothing at all is sent,
//           and every rank gives up (kRowsOutside), as the receivers' outputs are not right.
// Needs     input and output of a rank not to overlap; rows sent to different places.
#include "cuda/kernels/copy.cuh"
#include "cuda/kernels/shards.cuh"
#include "cuda/kernels/signal.cuh"

namespace jcoll::gpu {
namespace {

struct Update {
  int64_t from, size, to;  // Rows.
};

__device__ Update UpdateAt(const RaggedRows& rows, int64_t i) {
  const auto at = [&rows, i](const void* array) -> int64_t {
    return rows.is_int64 ? static_cast<const int64_t*>(array)[i]
                         : static_cast<const int32_t*>(array)[i];
  };
  return {at(rows.input_offsets), at(rows.send_sizes), at(rows.output_offsets)};
}

__device__ bool IsOutside(int64_t begin, int64_t size, int64_t num_rows) {
  return begin < 0 || size < 0 || size > num_rows || begin > num_rows - size;
}

__device__ uint32_t Saturated(int64_t x) {
  return x < 0 ? 0 : x > UINT32_MAX ? UINT32_MAX : static_cast<uint32_t>(x);
}

// Whether all updates are inside. Each thread looks at some, each block at all.
__device__ bool CheckUpdates(const Args& args, BlockSync* sync) {
  const RaggedRows& rows = args.rows;
  const int64_t num_updates = args.peers.num_ranks * rows.updates_per_rank;
  for (int64_t i = threadIdx.x; i < num_updates; i += blockDim.x) {
    const Update update = UpdateAt(rows, i);
    const bool at_sender = IsOutside(update.from, update.size, rows.input_rows);
    if (!at_sender && !IsOutside(update.to, update.size, rows.output_rows)) continue;
    const int64_t begin = at_sender ? update.from : update.to;
    const auto end = static_cast<int64_t>(static_cast<uint64_t>(begin) + update.size);
    sync->GiveUp(ErrorKind::kRowsOutside, static_cast<int>(i / rows.updates_per_rank),
                 Saturated(at_sender ? rows.input_rows : rows.output_rows), Saturated(end), 0);
    return false;
  }
  return true;
}

__device__ void SendUpdates(const Args& args, int peer) {
  const PeerTable& peers = args.peers;
  const RaggedRows& rows = args.rows;
  const char* input = static_cast<const char*>(peers.input[peers.rank]);
  char* output = static_cast<char*>(peers.output[peer]);
  for (int64_t u = 0; u < rows.updates_per_rank; ++u) {
    const Update update = UpdateAt(rows, peer * rows.updates_per_rank + u);
    CopyBytesTo(output + update.to * rows.row_nbytes, input + update.from * rows.row_nbytes,
                update.size * rows.row_nbytes);
  }
}

__global__ void __launch_bounds__(kThreadsPerBlock, 1)
    RaggedAllToAll(const __grid_constant__ Args args) {
  const PeerTable& peers = args.peers;
  BlockSync sync(peers, args.op_id);
  if (sync.Barrier(Order::kData) && sync.Agree(CheckUpdates(args, &sync))) {
    for (int turn = 0; turn < peers.num_ranks; ++turn) {
      SendUpdates(args, PeerInTurn(peers, turn));
    }
    sync.Barrier(Order::kData);
  }
  sync.Leave(args.poison);
}

}  // namespace

cudaError_t LaunchRaggedAllToAll(const Task& task, cudaStream_t stream) {
  return LaunchOn(stream, task.num_blocks, RaggedAllToAll, task.args);
}

}  // namespace jcoll::gpu
