// Reducing what all ranks have at the same place, in the order of the ranks: whoever does it comes
// to the same bits, so that all_reduce gives them on every rank and by every algorithm.
#pragma once

#include "cuda/kernels/elements.cuh"
#include "cuda/kernels/launchers.h"
#include "cuda/kernels/vector.cuh"

namespace jcoll::gpu {

// The reduction of vectors V at elements at, at + stride, ... of `count` arrays source(0),
// source(1), ..., in this order.
//
// As many arrays are loaded before any of them is used as a thread is to have loads in flight.
template <typename S, typename Op, int kLoads, typename V, int kWays, typename F>
__device__ __forceinline__ void ReduceSources(int count, F source, int64_t at, int64_t stride,
                                              int32_t divisor, V (&result)[kWays]) {
  using Acc = decltype(Widen(S()));
  constexpr int kFan = kLoads > kWays ? kLoads / kWays : 1;
  Acc acc[kWays][V::kSize] = {};
  for (int first = 0; first < count; first += kFan) {
    V loaded[kFan][kWays];
    JCOLL_UNROLL
    for (int k = 0; k < kFan; ++k) {
      if (first + k >= count) break;
      const S* array = source(first + k) + at;
      JCOLL_UNROLL
      for (int w = 0; w < kWays; ++w) loaded[k][w] = Load<V>(array + w * stride);
    }
    JCOLL_UNROLL
    for (int k = 0; k < kFan; ++k) {
      if (first + k >= count) break;
      JCOLL_UNROLL
      for (int w = 0; w < kWays; ++w) {
        JCOLL_UNROLL
        for (int e = 0; e < V::kSize; ++e) {
          const Acc x = Widen(loaded[k][w].e[e]);
          acc[w][e] = first + k == 0 ? x : Op::Combine(acc[w][e], x);
        }
      }
    }
  }
  JCOLL_UNROLL
  for (int w = 0; w < kWays; ++w) {
    JCOLL_UNROLL
    for (int e = 0; e < V::kSize; ++e) Narrow(Finish<Op>(acc[w][e], divisor), &result[w].e[e]);
  }
}

// Of all ranks' inputs. A small message takes the time of one load for 8 ranks, not of 8. A vector
// of 1-byte elements has 16 accumulators, beside which 128 registers hold fewer loads.
template <typename S, typename Op, typename V, int kWays>
__device__ __forceinline__ void ReduceRanks(const Args& args, int64_t at, int64_t stride,
                                            V (&result)[kWays]) {
  constexpr int kLoads = sizeof(S) == 1 ? 3 : 8;
  ReduceSources<S, Op, kLoads>(
      args.peers.num_ranks, [&](int p) { return static_cast<const S*>(args.peers.input[p]); }, at,
      stride, args.divisor, result);
}

// Reduces `count` elements of all inputs, from element `first` on, by all threads of the grid, and
// calls store(vector, i) for the result at each element i of [0, count), or for the several
// elements that a vector has. `alignment` is of all inputs at `first`, and of all that `store`
// writes to.
template <typename S, typename Op, typename F>
__device__ __forceinline__ void ReduceRange(const Args& args, int64_t first, int64_t count,
                                            const Alignment& alignment, F store) {
  // More ways would need more accumulators than there are registers.
  constexpr int kWays = sizeof(S) < 4 ? sizeof(S) : 4;
  // Where the addresses do not agree, elements go one by one.
  const bool wide = alignment.width() == kMaxVecNbytes;
  const int64_t head = wide ? alignment.head(kMaxVecNbytes) / int{sizeof(S)} : count;
  DealVectors<S, kMaxVecNbytes / sizeof(S), kWays>(
      count, head, GridThread(), GridThreads(),
      [&](auto vector, auto ways, int64_t i, int64_t stride) {
        using V = typename decltype(vector)::Type;
        V result[decltype(ways)::value];
        ReduceRanks<S, Op>(args, first + i, stride, result);
        JCOLL_UNROLL
        for (int w = 0; w < ways.value; ++w) store(result[w], i + w * stride);
      });
}

// Of all ranks' inputs at element `first`.
template <typename S>
__device__ __forceinline__ Alignment AlignmentOfInputs(const PeerTable& peers, int64_t first) {
  Alignment alignment(static_cast<const S*>(peers.input[0]) + first);
  for (int p = 1; p < peers.num_ranks; ++p) {
    alignment.Add(static_cast<const S*>(peers.input[p]) + first);
  }
  return alignment;
}

// ---- From a task to the types that do it.

// Returns f(Tag<Storage>) for a type that has the dtype's sums and products.
template <typename F>
cudaError_t WithSummable(DType dtype, F f) {
  switch (dtype) {
    case DType::kF16:
      return f(Tag<Float16>());
    case DType::kBF16:
      return f(Tag<BFloat16>());
    case DType::kF32:
      return f(Tag<float>());
    case DType::kF64:
      return f(Tag<double>());
    case DType::kF8E4M3FN:
      return f(Tag<Float8E4M3FN>());
    case DType::kF8E5M2:
      return f(Tag<Float8E5M2>());
    case DType::kS8:  // Integers wrap, with and without sign alike.
    case DType::kU8:
      return f(Tag<uint8_t>());
    case DType::kS16:
    case DType::kU16:
      return f(Tag<uint16_t>());
    case DType::kS32:
    case DType::kU32:
      return f(Tag<uint32_t>());
    case DType::kS64:
    case DType::kU64:
      return f(Tag<uint64_t>());
    default:
      return cudaErrorInvalidValue;
  }
}

// Likewise for minima and maxima.
template <typename F>
cudaError_t WithOrdered(DType dtype, F f) {
  switch (dtype) {
    case DType::kS8:
      return f(Tag<int8_t>());
    case DType::kS16:
      return f(Tag<int16_t>());
    case DType::kS32:
      return f(Tag<int32_t>());
    case DType::kS64:
      return f(Tag<int64_t>());
    default:
      return WithSummable(dtype, f);
  }
}

// Returns f(Tag<Storage>, Tag<Op>). A mean is a sum that Finish divides.
template <typename F>
cudaError_t WithReduction(const Task& task, F f) {
  switch (task.reduce_op) {
    case ReduceOp::kSum:
    case ReduceOp::kMean:
      return WithSummable(task.dtype, [&](auto storage) { return f(storage, Tag<Sum>()); });
    case ReduceOp::kProd:
      return WithSummable(task.dtype, [&](auto storage) { return f(storage, Tag<Prod>()); });
    case ReduceOp::kMin:
      return WithOrdered(task.dtype, [&](auto storage) { return f(storage, Tag<Min>()); });
    case ReduceOp::kMax:
      return WithOrdered(task.dtype, [&](auto storage) { return f(storage, Tag<Max>()); });
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace jcoll::gpu
