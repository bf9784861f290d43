// How a range is cut into one part per rank, where the parts are the kernel's own affair.
#pragma once

#include <cstdint>

#include "cuda/kernels/language.cuh"

namespace jcoll::gpu {

struct Shard {
  int64_t begin, count;  // Elements.
};

// Rank `rank` of `num_ranks`'s part of `count` elements. Parts begin on a line of 128 bytes of the
// range, and so all are aligned alike; the last ones may be shorter, or empty.
__device__ inline Shard ShardOf(int64_t count, int64_t element_nbytes, int rank, int num_ranks) {
  const int64_t line = 128 / element_nbytes;
  const int64_t lines = (count + line - 1) / line;
  const int64_t size = (lines + num_ranks - 1) / num_ranks * line;
  const int64_t begin = rank * size < count ? rank * size : count;
  return {begin, count - begin < size ? count - begin : size};
}

}  // namespace jcoll::gpu
