// A plan, by lines of data and flag (LL): the flag of a line says that its data are there.
//
// Phases    For each turn, the actions of this rank's program in their order. Every thread does
//           them all, for its lines of each chunk, and waits for nobody but who stores these.
// Layout    plan_scratch.h. A line has 8 bytes of a chunk.
// Flags     SignalPad::plan_lines, counted per block and turn; its parity chooses the half.
// Reuse     In the plan that follows, a rank may send without receiving, and so run ahead of those
//           who read it: it has to be told. Every rank tells all others after each turn that its
//           lines may be overwritten (SignalPad::lines_read); it is all of them, as the next plan
//           may have other edges. A sender waits for what its receivers told two turns ago, which
//           is seldom news. A line that has come cannot change before it is read, and flags are
//           compared for equality.
// Bytes     Twice what the plan sends, stored to peers by each rank.
// In place  No: an input may be read after outputs are written.
// Needs     at most kMaxLineBlocks blocks, and scratch that nothing else writes to.
#include "cuda/kernels/line_elements.cuh"
#include "cuda/kernels/plan_lanes.cuh"
#include "cuda/kernels/plan_scratch.h"
#include "cuda/kernels/plan_types.cuh"
#include "cuda/kernels/signal.cuh"

namespace jcoll::gpu {
namespace {

// A block's part of a rank's scratch, in one half.
__device__ Line* LinesOf(const PeerTable& peers, int rank, uint32_t half) {
  const int64_t first = (int64_t{blockIdx.x} * 2 + half) * kPlanLinesPerTurn;
  return static_cast<Line*>(peers.scratch[rank]) + first;
}

// The flag of each turn, and who may overwrite what. All threads of the block call all of it.
class LineFlow {
 public:
  // `sync` is made after the counter has been read, so that no thread writes it before.
  __device__ LineFlow(const PeerTable& peers, uint32_t flag, BlockSync* sync)
      : peers_(peers), pad_(peers.pad[peers.rank]), sync_(sync), flag_(flag) {}

  // The turn's flag; 0 if a peer did not come. `receivers`: to whom this rank will store.
  __device__ uint32_t Begin(const int32_t* receivers, int num_receivers) {
    if (++flag_ == 0) WrapAround();
    if (threadIdx.x == 0) pad_->plan_lines[blockIdx.x] = flag_;
    bool free = true;
    for (int r = threadIdx.x; r < num_receivers; r += blockDim.x) {
      free = free && AwaitRead(receivers[r], flag_ - 2);
    }
    return sync_->Agree(free && sync_->alive()) ? flag_ : 0;
  }

  // All threads of the block have agreed that they have read the turn's lines.
  __device__ void End() const { TellRead(flag_); }

 private:
  // When flags begin anew, old lines could pass for new ones.
  __device__ void WrapAround() {
    if (sync_->Barrier(Order::kReads)) {
      for (int i = threadIdx.x; i < 2 * kPlanLinesPerTurn; i += blockDim.x) {
        st_line_relaxed_sys(LinesOf(peers_, peers_.rank, 0) + i, Line::Make(0, 0));
      }
      TellRead(1);
      sync_->Barrier(Order::kData);
    }
    flag_ = 2;
  }

  __device__ bool AwaitRead(int peer, uint32_t flag) {
    const uint32_t* told = &pad_->lines_read[blockIdx.x][peer];
    const auto load = [told] { return ld_before_stores_sys(told); };
    const auto arrived = [flag](uint32_t seen) { return static_cast<int32_t>(seen - flag) >= 0; };
    return sync_->WaitFor(peer, flag, load, arrived, WaitPlace::kLinesRead);
  }

  __device__ void TellRead(uint32_t flag) const {
    for (int p = threadIdx.x; p < peers_.num_ranks; p += blockDim.x) {
      st_after_loads_sys(&peers_.pad[p]->lines_read[blockIdx.x][peers_.rank], flag);
    }
  }

  const PeerTable& peers_;
  SignalPad* const pad_;
  BlockSync* const sync_;
  uint32_t flag_;
};

// What a thread does of one turn.
template <typename S, typename Op>
class LineRun {
 public:
  __device__ LineRun(const Args& args, int turn, uint32_t flag, BlockSync* sync)
      : args_(args), turn_(args, turn), sync_(sync), flag_(flag) {}

  // False if a peer's line did not come.
  __device__ bool Run() const {
    for (int i = 0; i < args_.plan.num_actions; ++i) {
      const PlanAction action = args_.plan.actions[i];
      const LaneRange range = turn_.RangeOf(action.part);
      const auto num_lines =
          static_cast<int>((range.nbytes + kLineDataNbytes - 1) / kLineDataNbytes);
      // On a GPU, a thread has at most one for calls of the usual size.
      for (int line = threadIdx.x; line < num_lines; line += blockDim.x) {
        uint64_t data = 0;
        if (!Compute(action, range, line, &data)) return false;
        for (int t = 0; t < action.num_targets; ++t) {
          StoreTo(args_.plan.targets[action.first_target + t], range, line, data);
        }
      }
    }
    return true;
  }

 private:
  using Elements = LineElements<S>;
  using V = typename Elements::V;

  __device__ bool Compute(const PlanAction& action, const LaneRange& range, int line,
                          uint64_t* data) const {
    if (action.num_sources == 0) return true;
    const PlanSource* sources = args_.plan.sources + action.first_source;
    if (!LoadFrom(sources[0], range, line, data)) return false;
    if constexpr (!std::is_same_v<Op, Copy>) {
      if (action.num_sources > 1) return Reduce(sources, action.num_sources, range, line, data);
    }
    return true;
  }

  // *data has those of the first source.
  __device__ bool Reduce(const PlanSource* sources, int count, const LaneRange& range, int line,
                         uint64_t* data) const {
    using Acc = decltype(Widen(S()));
    Acc acc[V::kSize];
    V v = BitCast<V>(*data);
    JCOLL_UNROLL
    for (int e = 0; e < V::kSize; ++e) acc[e] = Widen(v.e[e]);
    for (int k = 1; k < count; ++k) {
      if (!LoadFrom(sources[k], range, line, data)) return false;
      v = BitCast<V>(*data);
      JCOLL_UNROLL
      for (int e = 0; e < V::kSize; ++e) acc[e] = Op::Combine(acc[e], Widen(v.e[e]));
    }
    JCOLL_UNROLL
    for (int e = 0; e < V::kSize; ++e) Narrow(acc[e], &v.e[e]);
    *data = BitCast<uint64_t>(v);
    return true;
  }

  __device__ bool LoadFrom(const PlanSource& source, const LaneRange& range, int line,
                           uint64_t* data) const {
    if (source.place != PlanPlace::kSlot) {
      const char* from = turn_.Own(source.place, source.index, range);
      *data = ElementsOf(range, line).LoadFrom(reinterpret_cast<const S*>(from));
      return true;
    }
    // Also what this very thread has stored there.
    const Line* slot = Slot(args_.peers.rank, source.index, line);
    Line seen;
    const auto load = [&] { return seen = ld_line_relaxed_sys(slot); };
    const auto arrived = [this](const Line& value) { return value.Has(flag_); };
    const int peer = source.peer == PlanSource::kNobody ? args_.peers.rank : source.peer;
    const WaitPlace place =
        AtLine(slot - static_cast<Line*>(args_.peers.scratch[args_.peers.rank]));
    if (!sync_->WaitFor(peer, flag_, load, arrived, place)) return false;
    *data = seen.data();
    return true;
  }

  __device__ void StoreTo(const PlanTarget& target, const LaneRange& range, int line,
                          uint64_t data) const {
    if (target.place == PlanPlace::kSlot) {
      st_line_relaxed_sys(Slot(target.rank, target.index, line), Line::Make(data, flag_));
    } else {
      char* to = turn_.Own(target.place, target.index, range);
      ElementsOf(range, line).StoreTo(reinterpret_cast<S*>(to), BitCast<V>(data));
    }
  }

  __device__ Elements ElementsOf(const LaneRange& range, int line) const {
    return Elements(line, range.nbytes / static_cast<int64_t>(sizeof(S)));
  }
  __device__ Line* Slot(int rank, int index, int line) const {
    const int64_t lines_per_slot = args_.plan_lanes.lane_nbytes / kLineDataNbytes;
    return LinesOf(args_.peers, rank, flag_ % 2) + index * lines_per_slot + line;
  }

  const Args& args_;
  const PlanTurn turn_;
  BlockSync* const sync_;
  const uint32_t flag_;
};

template <typename S, typename Op>
__global__ void __launch_bounds__(kThreadsPerBlock, 1) PlanLL(const __grid_constant__ Args args) {
  const uint32_t last_flag = args.peers.pad[args.peers.rank]->plan_lines[blockIdx.x];
  BlockSync sync(args.peers, args.op_id);
  LineFlow flow(args.peers, last_flag, &sync);
  for (int turn = 0; turn < args.plan_lanes.num_turns && sync.alive(); ++turn) {
    const uint32_t flag = flow.Begin(args.plan.receivers, args.plan.num_receivers);
    if (flag == 0) break;
    if (!sync.Agree(LineRun<S, Op>(args, turn, flag, &sync).Run())) break;
    flow.End();
  }
  sync.Leave(args.poison);
}

}  // namespace

cudaError_t LaunchPlanLL(const Task& task, cudaStream_t stream) {
  return WithPlanTypes(task, [&](auto storage, auto op) {
    using S = typename decltype(storage)::Type;
    using Op = typename decltype(op)::Type;
    return LaunchOn(stream, task.num_blocks, PlanLL<S, Op>, task.args);
  });
}

}  // namespace jcoll::gpu
