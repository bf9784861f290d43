// Which part of the work is a rank's, and in which order it turns to the others.
#pragma once

#include <cstdint>

#include "cuda/kernels/language.cuh"
#include "cuda/kernels/peer_table.h"

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

// The peers in the order in which this rank turns to them, itself first: at any time, every rank is
// turned to by about one other.
__device__ __forceinline__ int PeerInTurn(const PeerTable& peers, int turn) {
  const int peer = peers.rank + turn;
  return peer < peers.num_ranks ? peer : peer - peers.num_ranks;
}

}  // namespace jcoll::gpu
