#include "cuda/kernels/launch.h"

#include <algorithm>

#include "csrc/align.h"
#include "cuda/kernels/launchers.h"
#include "cuda/kernels/lines.h"

namespace jcoll::gpu {
namespace {

bool IsComplex(DType dtype) { return dtype == DType::kC64 || dtype == DType::kC128; }

// `bits`, which take `nbytes`, over and over.
uint64_t Repeated(uint64_t bits, int64_t nbytes) {
  for (; nbytes < 8; nbytes *= 2) bits |= bits << (8 * nbytes);
  return bits;
}

// NaN, or the largest value; for complex numbers two NaNs.
uint64_t PoisonPattern(DType dtype) {
  switch (dtype) {
    case DType::kF16:
      return Repeated(0x7e00, 2);
    case DType::kBF16:
      return Repeated(0x7fc0, 2);
    case DType::kF32:
    case DType::kC64:
      return Repeated(0x7fc00000, 4);
    case DType::kF64:
    case DType::kC128:
      return 0x7ff8000000000000;
    case DType::kF8E4M3FN:
    case DType::kF8E5M2:
      return Repeated(0x7f, 1);
    case DType::kBool:
      return Repeated(1, 1);
    case DType::kS8:
    case DType::kS16:
    case DType::kS32:
    case DType::kS64:
      return Repeated(~uint64_t{0} >> (65 - 8 * Size(dtype)), Size(dtype));
    default:
      return ~uint64_t{0};
  }
}

Task TaskOf(const Call& call) {
  Task task;
  Args& args = task.args;
  args.peers = call.peers;
  args.poison = {call.peers.output[call.peers.rank], OutputNbytes(call), PoisonPattern(call.dtype)};
  args.count = call.count;
  args.nbytes = call.count * Size(call.dtype);
  args.rows = call.rows;
  args.root = call.root;
  args.divisor = call.reduce_op == ReduceOp::kMean ? call.peers.num_ranks : 1;
  args.op_id = call.op_id;
  task.dtype = call.dtype;
  task.reduce_op = call.reduce_op;
  task.num_blocks = call.num_blocks > 0 ? call.num_blocks : BlocksFor(call, DeviceFacts());
  if (IsPlan(call.kernel)) {
    args.plan = CodeOf(call);
    args.plan_lanes = LanesOf(call, task.num_blocks);
  }
  if (IsComplex(call.dtype)) {
    task.dtype = call.dtype == DType::kC64 ? DType::kF32 : DType::kF64;
    args.count *= 2;
  } else if (call.dtype == DType::kBool) {
    task.dtype = DType::kU8;
  }
  return task;
}

}  // namespace

KernelFacts FactsOf(Kernel kernel) {
  switch (kernel) {
    case Kernel::kAllReduceOneShot:
      return {"all_reduce_one_shot", true, Overlap::kNone, false, false, LaunchAllReduceOneShot};
    case Kernel::kAllReduceOneShotLL:
      return {"all_reduce_one_shot_ll", true, Overlap::kSame, false, false,
              LaunchAllReduceOneShotLL};
    case Kernel::kAllReduceTwoShot:
      return {"all_reduce_two_shot", true, Overlap::kSame, false, false, LaunchAllReduceTwoShot};
    case Kernel::kAllReduceMultimemOneShot:
      return {"all_reduce_multimem_one_shot", true, Overlap::kNone, false, false,
              LaunchAllReduceMultimemOneShot};
    case Kernel::kAllReduceMultimemTwoShot:
      return {"all_reduce_multimem_two_shot", true, Overlap::kSame, false, false,
              LaunchAllReduceMultimemTwoShot};
    case Kernel::kReduceScatter:
      return {"reduce_scatter", true, Overlap::kOwnPart, true, false, LaunchReduceScatter};
    case Kernel::kAllGather:
      return {"all_gather", false, Overlap::kOwnPart, false, true, LaunchAllGather};
    case Kernel::kAllToAll:
      return {"all_to_all", false, Overlap::kNone, true, true, LaunchAllToAll};
    case Kernel::kRaggedAllToAll:
      return {"ragged_all_to_all", false, Overlap::kNone, false, false, LaunchRaggedAllToAll};
    case Kernel::kBroadcast:
      return {"broadcast", false, Overlap::kSame, false, false, LaunchBroadcast};
    case Kernel::kBarrier:
      return {"barrier", false, Overlap::kSame, false, false, LaunchBarrier};
    case Kernel::kPlanSimple:
      return {"plan_simple", true, Overlap::kNone, false, false, LaunchPlanSimple};
    case Kernel::kPlanLL:
      return {"plan_ll", true, Overlap::kNone, false, false, LaunchPlanLL};
  }
  return {"", false, Overlap::kNone, false, false, nullptr};
}

const char* Name(Kernel kernel) { return FactsOf(kernel).name; }

int64_t InputNbytes(const Call& call) {
  if (call.kernel == Kernel::kRaggedAllToAll) return call.rows.input_rows * call.rows.row_nbytes;
  int blocks = FactsOf(call.kernel).input_per_rank ? call.peers.num_ranks : 1;
  if (IsPlan(call.kernel)) blocks = call.program->in_blocks;
  return blocks * call.count * Size(call.dtype);
}

int64_t OutputNbytes(const Call& call) {
  if (call.kernel == Kernel::kRaggedAllToAll) return call.rows.output_rows * call.rows.row_nbytes;
  if (call.kernel == Kernel::kBarrier) return 0;
  int blocks = FactsOf(call.kernel).output_per_rank ? call.peers.num_ranks : 1;
  if (IsPlan(call.kernel)) blocks = call.program->out_blocks;
  return blocks * call.count * Size(call.dtype);
}

int64_t ScratchNbytes(const Call& call) {
  if (IsPlan(call.kernel)) {
    const int num_blocks = call.num_blocks > 0 ? call.num_blocks : BlocksFor(call, DeviceFacts());
    return PlanScratchNbytes(call, num_blocks);
  }
  if (call.kernel != Kernel::kAllReduceOneShotLL) return 0;
  return LineScratchNbytes(call.peers.num_ranks);
}

int BlocksFor(const Call& call, const DeviceFacts& device) {
  if (IsPlan(call.kernel)) return PlanBlocksFor(call, device);
  if (call.kernel == Kernel::kAllReduceOneShotLL) {
    constexpr int64_t kNbytesPerBlock = kLinesPerBlock * kLineDataNbytes;
    return static_cast<int>(std::max<int64_t>(1, CeilDiv(InputNbytes(call), kNbytesPerBlock)));
  }
  // A block that has less to do than this only makes the barriers longer.
  constexpr int64_t kNbytesPerBlock = 32 << 10;
  const int64_t nbytes = std::max(InputNbytes(call), OutputNbytes(call));
  const int64_t most = std::min(kMaxBlocks, device.num_sms);
  return static_cast<int>(std::clamp<int64_t>(CeilDiv(nbytes, kNbytesPerBlock), 1, most));
}

cudaError_t Launch(const Call& call, cudaStream_t stream) {
  return FactsOf(call.kernel).launch(TaskOf(call), stream);
}

}  // namespace jcoll::gpu
