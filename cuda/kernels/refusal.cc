// Refusal: what each kernel needs, as sentences. "all_reduce_one_shot" + " serves ... ranks, not
// 73".

#include <algorithm>

#include "cuda/kernels/launchers.h"
#include "cuda/kernels/lines.h"

namespace jcoll::gpu {
namespace {

using Why = std::optional<std::string>;

constexpr int64_t kMaxNbytes = int64_t{1} << 40;

const char* Name(ReduceOp op) {
  static constexpr const char* kNames[] = {"none", "sum", "mean", "min", "max", "prod"};
  return kNames[static_cast<int>(op)];
}

bool IsMultimem(Kernel kernel) {
  return kernel == Kernel::kAllReduceMultimemOneShot || kernel == Kernel::kAllReduceMultimemTwoShot;
}

std::string Version(int compute_capability) {
  return std::to_string(compute_capability / 10) + "." + std::to_string(compute_capability % 10);
}

Why OfDevice(const Call& call, const DeviceFacts& device) {
  const int needed = IsMultimem(call.kernel) ? 90 : 80;
  if (device.compute_capability >= needed) return std::nullopt;
  return "needs compute capability " + Version(needed) + ", and this GPU has " +
         Version(device.compute_capability);
}

Why OfPeers(const Call& call) {
  const PeerTable& peers = call.peers;
  if (peers.num_ranks < 1 || peers.num_ranks > kMaxRanks) {
    return "serves 1 to " + std::to_string(kMaxRanks) + " ranks, not " +
           std::to_string(peers.num_ranks);
  }
  if (peers.rank < 0 || peers.rank >= peers.num_ranks) {
    return "got rank " + std::to_string(peers.rank) + " of " + std::to_string(peers.num_ranks);
  }
  if (call.kernel == Kernel::kBroadcast && (call.root < 0 || call.root >= peers.num_ranks)) {
    return "got root " + std::to_string(call.root) + " of " + std::to_string(peers.num_ranks) +
           " ranks";
  }
  return std::nullopt;
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

bool Reduces(DType dtype, ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return dtype != DType::kBool;
    case ReduceOp::kMean:
      return IsFloat(dtype) || IsComplex(dtype);
    case ReduceOp::kProd:
      return dtype != DType::kBool && !IsComplex(dtype);
    case ReduceOp::kMin:
    case ReduceOp::kMax:
      return !IsComplex(dtype);
    default:
      return false;
  }
}

// What NVLink's switch reduces. It has minima and maxima of 16-bit floats too, but ours propagate
// NaN.
bool ReducesInSwitch(DType dtype, ReduceOp op) {
  const bool is_8_bit_float = dtype == DType::kF8E4M3FN || dtype == DType::kF8E5M2;
  if (IsFloat(dtype) || IsComplex(dtype)) {
    return (op == ReduceOp::kSum || op == ReduceOp::kMean) && !is_8_bit_float;
  }
  return Size(dtype) >= 4 && (op == ReduceOp::kSum || op == ReduceOp::kMin || op == ReduceOp::kMax);
}

Why OfReduction(const Call& call) {
  const bool can = Reduces(call.dtype, call.reduce_op) &&
                   (!IsMultimem(call.kernel) || ReducesInSwitch(call.dtype, call.reduce_op));
  if (can) return std::nullopt;
  return std::string("has no ") + Name(call.reduce_op) + " of " + Name(call.dtype);
}

Why OfSizes(const Call& call) {
  if (call.count < 0 || call.count > kMaxNbytes / Size(call.dtype)) {
    return "serves 0 to 2^40 bytes, not " + std::to_string(call.count) + " " + Name(call.dtype);
  }
  const int64_t nbytes = std::max(InputNbytes(call), OutputNbytes(call));
  if (nbytes > kMaxNbytes) {
    return "serves 0 to 2^40 bytes, not " + std::to_string(nbytes) + ", in blocks of " +
           std::to_string(call.count) + " " + Name(call.dtype);
  }
  if (call.num_blocks < 0 || call.num_blocks > kMaxBlocks) {
    return "runs in at most " + std::to_string(kMaxBlocks) + " thread blocks, not " +
           std::to_string(call.num_blocks);
  }
  return std::nullopt;
}

// Each block of threads has its lines, and no more.
Why OfLines(const Call& call) {
  if (call.kernel != Kernel::kAllReduceOneShotLL) return std::nullopt;
  const int64_t nbytes = InputNbytes(call);
  if (nbytes > kMaxLineMessageNbytes) {
    return "serves up to " + std::to_string(kMaxLineMessageNbytes) + " bytes, not " +
           std::to_string(nbytes);
  }
  const int64_t fewest = BlocksFor(call, DeviceFacts());
  if (call.num_blocks != 0 && (call.num_blocks < fewest || call.num_blocks > kMaxLineBlocks)) {
    return "runs " + std::to_string(nbytes) + " bytes in " + std::to_string(fewest) + " to " +
           std::to_string(kMaxLineBlocks) + " thread blocks, not " +
           std::to_string(call.num_blocks);
  }
  return std::nullopt;
}

Why OfRows(const Call& call) {
  if (call.kernel != Kernel::kRaggedAllToAll) return std::nullopt;
  const RaggedRows& rows = call.rows;
  const int64_t most = std::max(rows.input_rows, rows.output_rows);
  const bool negative = rows.input_rows < 0 || rows.output_rows < 0 || rows.row_nbytes < 0;
  if (negative || most > kMaxNbytes / std::max<int64_t>(rows.row_nbytes, 1)) {
    return "serves 0 to 2^40 bytes, not " + std::to_string(most) + " rows of " +
           std::to_string(rows.row_nbytes) + " bytes";
  }
  if (rows.updates_per_rank < 0 || rows.updates_per_rank > INT32_MAX) {
    return "got " + std::to_string(rows.updates_per_rank) + " updates per rank";
  }
  return std::nullopt;
}

// ---- Of addresses. A table that has none yet is not refused for that.

bool IsAligned(const void* p, int64_t nbytes) {
  return reinterpret_cast<uintptr_t>(p) % static_cast<uintptr_t>(nbytes) == 0;
}

bool OverlapWrongly(const Call& call) {
  const char* input = static_cast<const char*>(call.peers.input[call.peers.rank]);
  const char* output = static_cast<const char*>(call.peers.output[call.peers.rank]);
  if (input == nullptr || output == nullptr) return false;
  const int64_t own = call.peers.rank * call.count * Size(call.dtype);
  switch (FactsOf(call.kernel).overlap) {
    case Overlap::kSame:
      if (input == output) return false;
      break;
    case Overlap::kOwnPart:
      if (FactsOf(call.kernel).input_per_rank ? output == input + own : input == output + own) {
        return false;
      }
      break;
    case Overlap::kNone:
      break;
  }
  return input < output + OutputNbytes(call) && output < input + InputNbytes(call);
}

Why OfBuffers(const Call& call) {
  const PeerTable& peers = call.peers;
  const int64_t unit = std::min<int64_t>(Size(call.dtype), 8);
  for (int p = 0; p < peers.num_ranks; ++p) {
    if (IsAligned(peers.input[p], unit) && IsAligned(peers.output[p], unit)) continue;
    return "needs buffers aligned to their elements, and rank " + std::to_string(p) + "'s are not";
  }
  if (OverlapWrongly(call)) return "does not work on an output that overlaps the input like this";
  const bool is_filled = peers.input[peers.rank] != nullptr;
  const bool stores_to_all = call.kernel == Kernel::kAllReduceMultimemTwoShot;
  if (is_filled && IsMultimem(call.kernel) &&
      (peers.multicast_input == nullptr || (stores_to_all && peers.multicast_output == nullptr))) {
    return "needs multicast addresses of the buffers, and there are none";
  }
  return std::nullopt;
}

}  // namespace

std::optional<std::string> Refusal(const Call& call, const DeviceFacts& device) {
  const KernelFacts facts = FactsOf(call.kernel);
  Why why = OfDevice(call, device);
  if (!why) why = OfPeers(call);
  if (!why && IsPlan(call.kernel)) why = ProgramRefusal(call);
  if (!why) why = OfRows(call);
  if (!why) why = OfSizes(call);
  if (!why && IsPlan(call.kernel)) why = PlanSizesRefusal(call);
  if (!why && (IsPlan(call.kernel) ? call.program->reduces : facts.reduces)) {
    why = OfReduction(call);
  }
  if (!why) why = OfLines(call);
  if (!why) why = OfBuffers(call);
  if (!why) return std::nullopt;
  return std::string(facts.name) + " " + *why;
}

}  // namespace jcoll::gpu
