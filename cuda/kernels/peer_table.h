// What a kernel knows of the other ranks: addresses, and nothing of how they were come by. NCCL
// windows, virtual ranks on one GPU and the emulator on a CPU fill it in alike.
//
// Plain data, host and device; passed to kernels by value (kernel parameters hold 4 KiB).
#pragma once

#include <cstdint>

namespace jcoll::gpu {

// An NVLink domain has at most 72 GPUs (GB200 NVL72).
constexpr int kMaxRanks = 72;
// Blocks of one launch. All blocks of all ranks wait for each other, so that all must be resident
// at once: few, and the same number on every rank, as block b talks to the peers' block b.
constexpr int kMaxBlocks = 64;

// One rank's signal pad: symmetric memory, zeroed when it is made, and kept from then on.
//
// Block b of rank r tells block b of rank p how far it is by a store to p's inbox[b][r]; p waits
// for "at least", compared by the sign of the difference, so that 32 bits may wrap around and a
// peer may be ahead. Epochs are in device memory and not in arguments: a replayed CUDA graph
// repeats its arguments.
struct SignalPad {
  uint32_t inbox[kMaxBlocks][kMaxRanks];  // Written by peers.
  uint32_t epoch[kMaxBlocks];             // Barriers that block b has passed. Own.
  uint32_t line_epoch[kMaxBlocks];        // Exchanges by LL lines that block b has done. Own.
  // Turns of plans by LL lines that block b has begun (own), and that block b of rank r has left:
  // what rank r was sent in them, it has read. Written by peers.
  uint32_t plan_lines[kMaxBlocks];
  uint32_t lines_read[kMaxBlocks][kMaxRanks];
  // For what block b waited last, if it had to; see culprit.cuh. Own, and read by peers.
  uint64_t waiting[kMaxBlocks];
  uint32_t calls;        // Launches on this pad that have ended. Own, and read by peers.
  uint32_t blocks_done;  // Blocks of the present launch that have ended. Own.
  // 1 + the rank that is to blame, once any rank has given up: the counters disagree from then on,
  // and every later launch gives up at once. Written by whoever gives up, on all ranks.
  uint32_t dead;
  // 1 when block b has given up: it touches no peer's buffers any more. Own, and read by peers.
  uint32_t gone[kMaxBlocks];
  // 1 while a launch runs, of which there must be one at a time. Own.
  uint32_t owned;
};

enum class ErrorKind : uint32_t {
  kNone,
  kTimeout,          // `rank` waited for `peer` in vain.
  kPeerGaveUp,       // Another rank gave up, in this launch or an earlier one, and blames `peer`.
  kRowsOutside,      // ragged_all_to_all: what `rank` sends `peer` ends at row `seen` (at most
                     // 2^32 - 1) or begins before row 0; there are `expected`.
  kLaunchesOverlap,  // Two launches of `rank` on one pad ran at the same time.
};

// Why a kernel gave up, in host-mapped memory. The first block to fail writes it: `state` goes from
// 0 to 1 (claimed) to 2 (all fields are there).
struct ErrorRecord {
  uint32_t state;
  uint32_t op_id;  // Call::op_id: which call site.
  uint32_t call;   // SignalPad::calls: which launch on this communicator.
  int32_t rank;    // Who waited,
  int32_t peer;    // for whom;
  uint32_t block;
  uint32_t expected;  // what it needed to see
  uint32_t seen;      // and saw.
  uint64_t waited_ns;
  ErrorKind kind;
};

// Who fills it in keeps this rule: a rank's kernel reads and writes a place in memory by one
// virtual address only, as accesses by several would need proxy fences between them. So
// `input[rank]` and `output[rank]` are the only way in which the kernel touches its rank's own
// buffers, and a multicast address only serves places that it does not touch by these
// (multimem.cuh). The rest of the program may use other addresses of that memory: the end of a
// kernel orders them.
struct PeerTable {
  int32_t rank = 0;
  int32_t num_ranks = 1;
  // By rank; entry `rank` is one's own. Null where a kernel does not touch the peers' buffer.
  void* input[kMaxRanks] = {};
  void* output[kMaxRanks] = {};
  void* scratch[kMaxRanks] = {};  // Symmetric memory of ScratchNbytes(call), zeroed when made.
  SignalPad* pad[kMaxRanks] = {};
  // The multicast addresses of the same buffers (NVLS); null where there are none.
  void* multicast_input = nullptr;
  void* multicast_output = nullptr;
  ErrorRecord* error = nullptr;  // Host-mapped.
  uint64_t timeout_ns = 0;       // A wait that takes longer fails.
};

}  // namespace jcoll::gpu
