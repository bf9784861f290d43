// all_reduce, one-shot by lines of data and flag (LL): every rank pushes its input to all peers,
// and reduces what arrives. No barrier: the flag of a line says that its data are there.
//
// Phases    Each thread stores its lines to all peers' scratch, then waits for the same lines of
//           all peers in its own, and reduces them.
// Layout    lines.h. A line has 8 bytes of the message; block b has a run of consecutive lines.
// Flags     SignalPad::line_epoch, counted per block; its parity chooses the half of the scratch.
// Reuse     A rank's block b overwrites in exchange e what it sent in exchange e-2. The receiver's
//           block b has read that: it sent a line in e-1, for which it had to have left the kernel
//           of e-2, and our block has waited for that line before it left e-1. So each block has to
//           send at least one line to each peer in each exchange, even if it has no data; and two
//           halves are needed, as a peer may be one exchange ahead. For the same reason a line that
//           has been waited for cannot change before it is read, and flags are compared for
//           equality.
// Bytes     2 (N-1) M stored to peers by each rank.
// In place  A thread reads its elements of the input before it writes the same of the output: they
//           may be the same buffer. They must not overlap otherwise.
// Needs     at most kMaxLineMessageNbytes, and scratch that nothing else writes to.
#include "cuda/kernels/line_elements.cuh"
#include "cuda/kernels/lines.h"
#include "cuda/kernels/reduce.cuh"
#include "cuda/kernels/shards.cuh"
#include "cuda/kernels/signal.cuh"

namespace jcoll::gpu {
namespace {

// What this block sends, in lines of the message.
struct Share {
  int64_t first;
  int num_lines;
};
__device__ Share ShareOfBlock(int64_t nbytes) {
  const int64_t lines = (nbytes + kLineDataNbytes - 1) / kLineDataNbytes;
  const int64_t size = (lines + gridDim.x - 1) / gridDim.x;
  const int64_t first = blockIdx.x * size;
  const int64_t left = lines - first;
  return {first, static_cast<int>(left < 1 ? 1 : left < size ? left : size)};
}

// The lines of this block that `source` has sent to `receiver`.
__device__ Line* LinesOf(const PeerTable& peers, int receiver, int source, uint32_t flag) {
  const int64_t region = (blockIdx.x * 2 + flag % 2) * int64_t{peers.num_ranks} + source;
  return static_cast<Line*>(peers.scratch[receiver]) + region * kLinesPerBlock;
}

__device__ void CleanLines(const PeerTable& peers) {
  Line* lines = LinesOf(peers, peers.rank, 0, 0);
  for (int i = threadIdx.x; i < 2 * peers.num_ranks * kLinesPerBlock; i += blockDim.x) {
    st_line_relaxed_sys(lines + i, Line::Make(0, 0));
  }
}

// Reduces line `i` of this block over all ranks, in their order. False if a peer's did not come.
template <typename S, typename Op>
__device__ bool ReduceLine(const Args& args, BlockSync* sync, uint32_t flag, int i, uint64_t own,
                           Vec<S, kLineDataNbytes / sizeof(S)>* result) {
  using V = Vec<S, kLineDataNbytes / sizeof(S)>;
  using Acc = decltype(Widen(S()));
  constexpr int kFan = 8;  // Lines that are looked at before the first is waited for.
  const PeerTable& peers = args.peers;
  const Line* lines = LinesOf(peers, peers.rank, 0, flag) + i;
  Acc acc[V::kSize] = {};
  for (int first = 0; first < peers.num_ranks; first += kFan) {
    Line seen[kFan];
    JCOLL_UNROLL
    for (int k = 0; k < kFan; ++k) {
      if (first + k >= peers.num_ranks) break;
      seen[k] = ld_line_relaxed_sys(lines + (first + k) * kLinesPerBlock);
    }
    JCOLL_UNROLL
    for (int k = 0; k < kFan; ++k) {
      const int p = first + k;
      if (p >= peers.num_ranks) break;
      if (p == peers.rank) {
        seen[k] = Line::Make(own, flag);
      } else if (!seen[k].Has(flag)) {
        const auto load = [&] { return seen[k] = ld_line_relaxed_sys(lines + p * kLinesPerBlock); };
        const auto arrived = [flag](const Line& line) { return line.Has(flag); };
        if (!sync->WaitFor(p, flag, load, arrived)) return false;
      }
      const V v = BitCast<V>(seen[k].data());
      JCOLL_UNROLL
      for (int e = 0; e < V::kSize; ++e) {
        const Acc x = Widen(v.e[e]);
        acc[e] = p == 0 ? x : Op::Combine(acc[e], x);
      }
    }
  }
  JCOLL_UNROLL
  for (int e = 0; e < V::kSize; ++e) Narrow(Finish<Op>(acc[e], args.divisor), &result->e[e]);
  return true;
}

template <typename S, typename Op>
__device__ void Exchange(const Args& args, BlockSync* sync, uint32_t flag) {
  const PeerTable& peers = args.peers;
  const S* input = static_cast<const S*>(peers.input[peers.rank]);
  const Share share = ShareOfBlock(args.count * static_cast<int64_t>(sizeof(S)));
  // On a GPU, a thread has at most one line.
  for (int i = threadIdx.x; i < share.num_lines; i += blockDim.x) {
    const LineElements<S> elements(share.first + i, args.count);
    const uint64_t own = elements.LoadFrom(input);
    for (int turn = 1; turn < peers.num_ranks; ++turn) {
      const int p = PeerInTurn(peers, turn);
      st_line_relaxed_sys(LinesOf(peers, p, peers.rank, flag) + i, Line::Make(own, flag));
    }
  }
  for (int i = threadIdx.x; i < share.num_lines; i += blockDim.x) {
    const LineElements<S> elements(share.first + i, args.count);
    typename LineElements<S>::V result;
    if (!ReduceLine<S, Op>(args, sync, flag, i, elements.LoadFrom(input), &result)) return;
    elements.StoreTo(static_cast<S*>(peers.output[peers.rank]), result);
  }
}

template <typename S, typename Op>
__global__ void __launch_bounds__(kThreadsPerBlock, 1)
    AllReduceOneShotLL(const __grid_constant__ Args args) {
  BlockSync sync(args.peers, args.op_id);
  if (sync.alive()) {
    const uint32_t flag = sync.NextLines([&] { CleanLines(args.peers); });
    if (sync.alive()) Exchange<S, Op>(args, &sync, flag);
  }
  sync.Leave(args.poison);
}

}  // namespace

cudaError_t LaunchAllReduceOneShotLL(const Task& task, cudaStream_t stream) {
  return WithReduction(task, [&](auto storage, auto op) {
    using S = typename decltype(storage)::Type;
    using Op = typename decltype(op)::Type;
    return LaunchOn(stream, task.num_blocks, AllReduceOneShotLL<S, Op>, task.args);
  });
}

}  // namespace jcoll::gpu
