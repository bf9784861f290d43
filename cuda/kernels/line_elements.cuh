// The data of a line (LL) as elements of an array.
#pragma once

#include "cuda/kernels/lines.h"
#include "cuda/kernels/vector.cuh"

namespace jcoll::gpu {

// The elements of one line, in an array of `count` elements at `p`; past its end they are zero.
template <typename S>
struct LineElements {
  static constexpr int kSize = kLineDataNbytes / sizeof(S);
  using V = Vec<S, kSize>;

  __device__ LineElements(int64_t line, int64_t count)
      : first(line * kSize), num(count - first < kSize ? static_cast<int>(count - first) : kSize) {}

  __device__ bool IsOneVector(const S* p) const {
    return num == kSize && reinterpret_cast<uintptr_t>(p + first) % kLineDataNbytes == 0;
  }
  __device__ uint64_t LoadFrom(const S* p) const {
    if (IsOneVector(p)) return BitCast<uint64_t>(Load<V>(p + first));
    V v = {};
    JCOLL_UNROLL
    for (int e = 0; e < kSize; ++e) {
      if (e < num) v.e[e] = Load<Vec<S, 1>>(p + first + e).e[0];
    }
    return BitCast<uint64_t>(v);
  }
  __device__ void StoreTo(S* p, const V& v) const {
    if (IsOneVector(p)) return Store(p + first, v);
    JCOLL_UNROLL
    for (int e = 0; e < kSize; ++e) {
      if (e < num) Store(p + first + e, Vec<S, 1>{{v.e[e]}});
    }
  }

  const int64_t first;
  const int num;  // Not positive: the line has no data.
};

}  // namespace jcoll::gpu
