#include "cuda/kernels/launch.h"

#include <algorithm>

#include "csrc/align.h"
#include "cuda/kernels/launchers.h"

namespace jcoll::gpu {
namespace {

// ---- What a kernel needs.

struct KernelFacts {
  const char* name;
  bool reduces;
  int64_t (*traffic)(const Call&);  // Bytes that a rank moves, as far as they decide the blocks.
  cudaError_t (*launch)(const Task&, cudaStream_t);
};

int64_t BlockNbytes(const Call& call) { return call.count * Size(call.dtype); }
int64_t AllBlocksNbytes(const Call& call) { return BlockNbytes(call) * call.peers.num_ranks; }

KernelFacts FactsOf(Kernel kernel) {
  switch (kernel) {
    case Kernel::kAllReduceOneShot:
      return {"all_reduce_one_shot", true, AllBlocksNbytes, LaunchAllReduceOneShot};
    case Kernel::kAllReduceTwoShot:
      return {"all_reduce_two_shot", true, BlockNbytes, LaunchAllReduceTwoShot};
    default:
      return {"", false, BlockNbytes, nullptr};
  }
}

bool IsFloat(DType dtype) {
  switch (dtype) {
    case DType::kF16:
    case DType::kBF16:
    case DType::kF32:
    case DType::kF64:
    case DType::kF8E4M3FN:
    case DType::kF8E5M2:
      return true;
    default:
      return false;
  }
}
bool IsComplex(DType dtype) { return dtype == DType::kC64 || dtype == DType::kC128; }

const char* Name(ReduceOp op) {
  static constexpr const char* kNames[] = {"none", "sum", "mean", "min", "max", "prod"};
  return kNames[static_cast<int>(op)];
}

bool Reduces(DType dtype, ReduceOp op) {
  switch (op) {
    case ReduceOp::kNone:
      return false;
    case ReduceOp::kSum:
      return dtype != DType::kBool;
    case ReduceOp::kMean:
      return IsFloat(dtype) || IsComplex(dtype);
    case ReduceOp::kProd:
      return dtype != DType::kBool && !IsComplex(dtype);
    case ReduceOp::kMin:
    case ReduceOp::kMax:
      return !IsComplex(dtype);
  }
  return false;
}

// ---- From a Call to a Task.

// NaN, or the largest value; for complex numbers twice that. Repeated to 8 bytes.
uint64_t PoisonPattern(DType dtype) {
  const auto repeat = [](uint64_t bits, int nbytes) {
    for (; nbytes < 8; nbytes *= 2) bits |= bits << (8 * nbytes);
    return bits;
  };
  const int nbytes = static_cast<int>(std::min<int64_t>(Size(dtype), 8));
  switch (dtype) {
    case DType::kF16:
      return repeat(0x7e00, 2);
    case DType::kBF16:
      return repeat(0x7fc0, 2);
    case DType::kF32:
    case DType::kC64:
      return repeat(0x7fc00000, 4);
    case DType::kF64:
    case DType::kC128:
      return 0x7ff8000000000000;
    case DType::kF8E4M3FN:
    case DType::kF8E5M2:
      return repeat(0x7f, 1);
    case DType::kBool:
      return repeat(1, 1);
    case DType::kS8:
    case DType::kS16:
    case DType::kS32:
    case DType::kS64:
      return repeat(~uint64_t{0} >> (65 - 8 * nbytes), nbytes);
    default:
      return ~uint64_t{0};
  }
}

int64_t OutputNbytes(const Call& call) {
  switch (call.kernel) {
    case Kernel::kAllGather:
    case Kernel::kAllToAll:
      return AllBlocksNbytes(call);
    case Kernel::kRaggedAllToAll:
      return call.rows.output_rows * call.rows.row_nbytes;
    case Kernel::kBarrier:
      return 0;
    default:
      return BlockNbytes(call);
  }
}

Task TaskOf(const Call& call) {
  Task task;
  Args& args = task.args;
  args.peers = call.peers;
  args.poison = {call.peers.output[call.peers.rank], OutputNbytes(call), PoisonPattern(call.dtype)};
  args.count = call.count;
  args.nbytes = BlockNbytes(call);
  args.rows = call.rows;
  args.root = call.root;
  args.divisor = call.reduce_op == ReduceOp::kMean ? call.peers.num_ranks : 1;
  args.op_id = call.op_id;
  task.dtype = call.dtype;
  task.reduce_op = call.reduce_op;
  task.num_blocks = call.num_blocks > 0 ? call.num_blocks : BlocksFor(call, DeviceFacts());
  if (IsComplex(call.dtype)) {
    task.dtype = call.dtype == DType::kC64 ? DType::kF32 : DType::kF64;
    args.count *= 2;
  } else if (call.dtype == DType::kBool) {
    task.dtype = DType::kU8;
  }
  return task;
}

// ---- Refusals.

std::optional<std::string> RefusalOfReduction(const Call& call) {
  if (Reduces(call.dtype, call.reduce_op)) return std::nullopt;
  return std::string("cannot form the ") + Name(call.reduce_op) + " of " + Name(call.dtype);
}

std::optional<std::string> RefusalOfDevice(const DeviceFacts& device) {
  if (device.compute_capability >= 80) return std::nullopt;
  return "needs compute capability 8.0, and this GPU has " +
         std::to_string(device.compute_capability / 10) + "." +
         std::to_string(device.compute_capability % 10);
}

std::optional<std::string> RefusalOfPeers(const Call& call) {
  const PeerTable& peers = call.peers;
  if (peers.num_ranks < 1 || peers.num_ranks > kMaxRanks) {
    return "serves 1 to " + std::to_string(kMaxRanks) + " ranks, not " +
           std::to_string(peers.num_ranks);
  }
  if (peers.rank < 0 || peers.rank >= peers.num_ranks) {
    return "rank " + std::to_string(peers.rank) + " is not one of " +
           std::to_string(peers.num_ranks);
  }
  return std::nullopt;
}

std::optional<std::string> RefusalOfSizes(const Call& call) {
  constexpr int64_t kMaxNbytes = int64_t{1} << 40;
  if (call.count < 0 || call.count > kMaxNbytes / Size(call.dtype)) {
    return "serves 0 to 2^40 bytes, not " + std::to_string(call.count) + " elements of " +
           Name(call.dtype);
  }
  if (call.num_blocks < 0 || call.num_blocks > kMaxBlocks) {
    return "runs in at most " + std::to_string(kMaxBlocks) + " blocks, not " +
           std::to_string(call.num_blocks);
  }
  return std::nullopt;
}

// Of the addresses; nothing as long as the table has none.
std::optional<std::string> RefusalOfBuffers(const Call& call) {
  const PeerTable& peers = call.peers;
  const int64_t unit = std::min<int64_t>(Size(call.dtype), 8);
  for (int p = 0; p < peers.num_ranks; ++p) {
    if (reinterpret_cast<uintptr_t>(peers.input[p]) % unit != 0 ||
        reinterpret_cast<uintptr_t>(peers.output[p]) % unit != 0) {
      return "needs buffers aligned to their elements, and rank " + std::to_string(p) +
             "'s are not";
    }
  }
  const bool in_place =
      peers.input[peers.rank] != nullptr && peers.input[peers.rank] == peers.output[peers.rank];
  if (in_place && call.kernel == Kernel::kAllReduceOneShot) {
    return "cannot work in place: peers read the input while the output is written";
  }
  return std::nullopt;
}

}  // namespace

const char* Name(Kernel kernel) { return FactsOf(kernel).name; }

std::optional<std::string> Refusal(const Call& call, const DeviceFacts& device) {
  const KernelFacts facts = FactsOf(call.kernel);
  std::optional<std::string> why;
  if (facts.launch == nullptr) why = "is not built";
  if (!why) why = RefusalOfDevice(device);
  if (!why) why = RefusalOfPeers(call);
  if (!why) why = RefusalOfSizes(call);
  if (!why && facts.reduces) why = RefusalOfReduction(call);
  if (!why) why = RefusalOfBuffers(call);
  if (!why) return std::nullopt;
  return std::string(facts.name) + " " + *why;
}

int64_t ScratchNbytes(const Call&) { return 0; }

int BlocksFor(const Call& call, const DeviceFacts& device) {
  // A block that has less to do than this only adds a barrier.
  constexpr int64_t kNbytesPerBlock = 64 << 10;
  const int64_t wanted = CeilDiv(FactsOf(call.kernel).traffic(call), kNbytesPerBlock);
  const int64_t most = std::min(kMaxBlocks, device.num_sms);
  return static_cast<int>(std::max<int64_t>(1, std::min(wanted, most)));
}

cudaError_t Launch(const Call& call, cudaStream_t stream) {
  return FactsOf(call.kernel).launch(TaskOf(call), stream);
}

}  // namespace jcoll::gpu
