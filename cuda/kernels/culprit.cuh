// Who is to blame when a peer does not come: perhaps a rank that the peer waits for in its turn, as
// in a ring, where all wait for their neighbours and time out at about the same time.
#pragma once

#include "cuda/kernels/memory_order.cuh"
#include "cuda/kernels/peer_table.h"

namespace jcoll::gpu {

// Where a rank looks for what a peer stores.
enum class WaitPlace : uint32_t {
  kUntold,     // Peers need not know.
  kInbox,      // SignalPad::inbox
  kLinesRead,  // SignalPad::lines_read
  kFirstLine,  // From here on: kFirstLine + the number of a line in its scratch.
};
inline __device__ WaitPlace AtLine(int64_t number) {
  return static_cast<WaitPlace>(static_cast<uint32_t>(WaitPlace::kFirstLine) +
                                static_cast<uint32_t>(number));
}

// What a block waits for, in one word, so that it is never half of one and half of another.
struct Waiting {
  uint32_t until;   // At least.
  WaitPlace place;  // 24 bits.
  int peer;         // -1: nobody.

  __device__ uint64_t ToWord() const {
    return uint64_t{until} << 32 | uint64_t{static_cast<uint32_t>(place)} << 8 |
           static_cast<uint64_t>(peer + 1);
  }
  static __device__ Waiting Of(uint64_t word) {
    return {static_cast<uint32_t>(word >> 32), static_cast<WaitPlace>(word >> 8 & 0xffffff),
            static_cast<int>(word & 0xff) - 1};
  }
};

// Whether `rank` still misses what it said it waits for: it need not have taken it back.
__device__ inline bool IsMissing(const PeerTable& peers, int rank, const Waiting& waiting) {
  const SignalPad* pad = peers.pad[rank];
  uint32_t seen;
  if (waiting.place == WaitPlace::kInbox) {
    seen = ld_relaxed_sys(&pad->inbox[blockIdx.x][waiting.peer]);
  } else if (waiting.place == WaitPlace::kLinesRead) {
    seen = ld_relaxed_sys(&pad->lines_read[blockIdx.x][waiting.peer]);
  } else {
    const auto number =
        static_cast<uint32_t>(waiting.place) - static_cast<uint32_t>(WaitPlace::kFirstLine);
    const Line line = ld_line_relaxed_sys(static_cast<const Line*>(peers.scratch[rank]) + number);
    seen = line.half[1] >> 32;
  }
  return static_cast<int32_t>(seen - waiting.until) < 0;
}

// The rank that this block of `peer` waits for, or of whom that one waits for, and so on. Ranks
// that wait for each other in a circle are all to blame.
__device__ inline int FindCulprit(const PeerTable& peers, int peer) {
  int culprit = peer;
  for (int i = 0; i < peers.num_ranks; ++i) {
    const Waiting waiting = Waiting::Of(ld_relaxed_sys(&peers.pad[culprit]->waiting[blockIdx.x]));
    if (waiting.peer < 0 || waiting.peer == peers.rank || !IsMissing(peers, culprit, waiting)) {
      break;
    }
    culprit = waiting.peer;
  }
  return culprit;
}

}  // namespace jcoll::gpu
