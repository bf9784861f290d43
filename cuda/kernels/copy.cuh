// Moving bytes from one place to one or several others, by all threads of the grid.
#pragma once

#include "cuda/kernels/vector.cuh"

namespace jcoll::gpu {

template <int kNbytes, typename F>
__device__ __forceinline__ void CopyVectors(const char* src, int64_t nbytes, int head, F store) {
  DealVectors<uint8_t, kNbytes, 4>(nbytes, head, GridThread(), GridThreads(),
                                   [&](auto vector, auto ways, int64_t i, int64_t stride) {
                                     using V = typename decltype(vector)::Type;
                                     V loaded[decltype(ways)::value];
                                     JCOLL_UNROLL
                                     for (int w = 0; w < ways.value; ++w) {
                                       loaded[w] = Load<V>(src + i + w * stride);
                                     }
                                     JCOLL_UNROLL
                                     for (int w = 0; w < ways.value; ++w) {
                                       store(loaded[w], i + w * stride);
                                     }
                                   });
}

// Loads the bytes [0, nbytes) at `src` and calls store(vector, i) for what is to go to byte i, and
// the bytes after it that the vector has. `alignment` is of src and of all that `store` writes to.
template <typename F>
__device__ __forceinline__ void CopyBytes(const void* src, int64_t nbytes,
                                          const Alignment& alignment, F store) {
  const char* from = static_cast<const char*>(src);
  const int width = alignment.width(), head = alignment.head(width);
  if (width == 16) {
    CopyVectors<16>(from, nbytes, head, store);
  } else if (width == 8) {
    CopyVectors<8>(from, nbytes, head, store);
  } else if (width == 4) {
    CopyVectors<4>(from, nbytes, head, store);
  } else if (width == 2) {
    CopyVectors<2>(from, nbytes, head, store);
  } else {
    CopyVectors<1>(from, nbytes, head, store);
  }
}

// To one place.
__device__ __forceinline__ void CopyBytesTo(void* dst, const void* src, int64_t nbytes) {
  Alignment alignment(src);
  alignment.Add(dst);
  CopyBytes(src, nbytes, alignment,
            [dst](const auto& value, int64_t i) { Store(static_cast<char*>(dst) + i, value); });
}

}  // namespace jcoll::gpu
