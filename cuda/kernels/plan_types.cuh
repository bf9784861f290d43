// From a task to the types with which a plan does it.
#pragma once

#include "cuda/kernels/reduce.cuh"

namespace jcoll::gpu {

// What plans that do not reduce do: their elements have no values, only a size.
struct Copy {};

// Returns f(Tag<Storage>, Tag<Op>).
template <typename F>
cudaError_t WithPlanTypes(const Task& task, F f) {
  if (task.reduce_op != ReduceOp::kNone) return WithReduction(task, f);
  switch (Size(task.dtype)) {
    case 1:
      return f(Tag<uint8_t>(), Tag<Copy>());
    case 2:
      return f(Tag<uint16_t>(), Tag<Copy>());
    case 4:
      return f(Tag<uint32_t>(), Tag<Copy>());
    case 8:
      return f(Tag<uint64_t>(), Tag<Copy>());
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace jcoll::gpu
