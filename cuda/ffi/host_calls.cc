#include "cuda/ffi/host_calls.h"

#include <cstdint>

namespace jcoll::gpu {
namespace {

// An element type as NCCL adds it: so many of these per element of ours.
struct Addend {
  nccl::DataType type;
  int64_t per_element = 1;
};

std::optional<Addend> AddendOf(DType dtype) {
  switch (dtype) {
    case DType::kF16:
      return Addend{nccl::kFloat16};
    case DType::kBF16:
      return Addend{nccl::kBfloat16};
    case DType::kF32:
      return Addend{nccl::kFloat32};
    case DType::kF64:
      return Addend{nccl::kFloat64};
    case DType::kS8:
      return Addend{nccl::kInt8};
    case DType::kS32:
      return Addend{nccl::kInt32};
    case DType::kS64:
      return Addend{nccl::kInt64};
    case DType::kU8:
      return Addend{nccl::kUint8};
    case DType::kU32:
      return Addend{nccl::kUint32};
    case DType::kU64:
      return Addend{nccl::kUint64};
    case DType::kC64:
      return Addend{nccl::kFloat32, 2};
    case DType::kC128:
      return Addend{nccl::kFloat64, 2};
    // NCCL would add 8-bit floats in their own precision, and has no 16-bit integers.
    case DType::kF8E4M3FN:
    case DType::kF8E5M2:
    case DType::kS16:
    case DType::kU16:
    case DType::kBool:
      return std::nullopt;
  }
  return std::nullopt;
}

nccl::RedOp RedOpOf(ReduceOp op) {
  switch (op) {
    case ReduceOp::kMean:
      return nccl::kAvg;
    case ReduceOp::kMin:
      return nccl::kMin;
    case ReduceOp::kMax:
      return nccl::kMax;
    case ReduceOp::kProd:
      return nccl::kProd;
    case ReduceOp::kNone:
    case ReduceOp::kSum:
      break;
  }
  return nccl::kSum;
}

// Blocks of `nbytes`: block r of the input to rank r, whose block for us becomes block r of the
// output.
nccl::Result AllToAll(const Communicator& communicator, const void* input, void* output,
                      int64_t nbytes, cudaStream_t stream) {
  const nccl::Api& api = communicator.api();
  const auto* from = static_cast<const char*>(input);
  auto* to = static_cast<char*>(output);
  nccl::Result first = api.GroupStart();
  auto note = [&first](nccl::Result result) {
    if (first == nccl::kSuccess || first == nccl::kInProgress) first = result;
  };
  for (int rank = 0; rank < communicator.num_ranks(); ++rank) {
    note(api.Send(from + rank * nbytes, nbytes, nccl::kUint8, rank, communicator.comm(), stream));
    note(api.Recv(to + rank * nbytes, nbytes, nccl::kUint8, rank, communicator.comm(), stream));
  }
  note(api.GroupEnd());
  return first;
}

nccl::Result Issue(const CallSite& site, const Communicator& communicator, const void* input,
                   void* output, cudaStream_t stream) {
  const nccl::Api& api = communicator.api();
  nccl::Comm* const comm = communicator.comm();
  const int64_t nbytes = site.count * Size(site.dtype);
  const Addend addend = AddendOf(site.dtype).value_or(Addend{nccl::kUint8});
  const size_t addends = site.count * addend.per_element;
  switch (site.op) {
    case Op::kAllReduce:
      return api.AllReduce(input, output, addends, addend.type, RedOpOf(site.reduce_op), comm,
                           stream);
    case Op::kReduceScatter:
      return api.ReduceScatter(input, output, addends, addend.type, RedOpOf(site.reduce_op), comm,
                               stream);
    case Op::kAllGather:
      return api.AllGather(input, output, nbytes, nccl::kUint8, comm, stream);
    case Op::kAllToAll:
      return AllToAll(communicator, input, output, nbytes, stream);
    case Op::kBroadcast:
      return api.Broadcast(input, output, nbytes, nccl::kUint8, static_cast<int>(site.root), comm,
                           stream);
    case Op::kRaggedAllToAll:  // This one and the next three are refused.
    case Op::kReduce:
    case Op::kGather:
    case Op::kScatter:
    case Op::kBarrier:
      break;
  }
  void* const word = communicator.barrier_word();
  return api.AllReduce(word, word, 1, nccl::kInt32, nccl::kSum, comm, stream);
}

}  // namespace

std::optional<std::string> HostCallsRefusal(const CallSite& site) {
  if (site.op == Op::kRaggedAllToAll) {
    return "NCCL's functions need the counts on the host, where they are not";
  }
  if (site.op == Op::kReduce || site.op == Op::kGather || site.op == Op::kScatter) {
    return "jcoll asks NCCL for no " + site.op_name;
  }
  if (site.reduce_op == ReduceOp::kNone) return std::nullopt;
  const auto addend = AddendOf(site.dtype);
  if (!addend) return std::string("NCCL does not reduce ") + Name(site.dtype) + " rightly";
  const bool is_linear = site.reduce_op == ReduceOp::kSum || site.reduce_op == ReduceOp::kMean;
  if (addend->per_element > 1 && !is_linear) return "NCCL has no complex numbers";
  return std::nullopt;
}

std::string HostCallsCaveat(const CallSite& site) {
  const bool is_16_bits = site.dtype == DType::kF16 || site.dtype == DType::kBF16;
  const bool is_real = is_16_bits || site.dtype == DType::kF32 || site.dtype == DType::kF64;
  switch (site.reduce_op) {
    case ReduceOp::kMin:
    case ReduceOp::kMax:
      return is_real ? "its min and max take no notice of NaN" : "";
    case ReduceOp::kSum:
    case ReduceOp::kMean:
    case ReduceOp::kProd:
      return is_16_bits ? "it rounds 16-bit floats at every rank" : "";
    case ReduceOp::kNone:
      break;
  }
  return "";
}

std::optional<Failure> RunHostCalls(const CallSite& site, const Communicator& communicator,
                                    const HostWatch::Marks& marks, const Buffers& buffers,
                                    cudaStream_t stream) {
  const double timeout_s = site.timeout_seconds();
  nccl::Result broken = nccl::kSuccess;  // A peer that died, or a network that did.
  communicator.api().CommGetAsyncError(communicator.comm(), &broken);
  auto failure = communicator.Check("the communicator", broken, timeout_s);
  if (!failure) failure = device::Copy(marks.word, marks.begun, sizeof(*marks.word), stream);
  if (!failure) {
    const nccl::Result result =
        Issue(site, communicator, buffers.inputs[0].data, buffers.outputs[0].data, stream);
    failure = communicator.Check("the collective", result, timeout_s);
  }
  if (!failure) failure = device::Copy(marks.word, marks.done, sizeof(*marks.word), stream);
  if (failure) failure->message = site.Where() + ": " + failure->message;
  return failure;
}

}  // namespace jcoll::gpu
