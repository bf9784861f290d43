// Memory that every rank of a clique has, and that every rank can reach: jcoll's own windows.
#pragma once

#include <cstdint>
#include <memory>
#include <variant>

#include "cuda/ffi/communicator.h"
#include "cuda/kernels/peer_table.h"

namespace jcoll::gpu {

// One buffer as this rank reaches it on every rank.
struct PeerPointers {
  void* of_rank[kMaxRanks] = {};  // Null: this device cannot load from or store to that rank's.
  void* multicast = nullptr;      // Null: not asked for, or the devices have none.
};

// Asks for the addresses of what lies at `offset` in a window, on all ranks. The first question for
// a multicast address on a communicator is collective, as NCCL builds the multicast group then.
std::variant<PeerPointers, Failure> ReadPointers(const Communicator& communicator,
                                                 nccl::Window* window, size_t offset,
                                                 bool multicast);

struct SymmetricBuffer {
  int64_t nbytes = 0;
  nccl::Window* window = nullptr;
  PeerPointers pointers;
};

// Collective; all ranks give the same size. The memory is zero on all ranks when it returns. It is
// never freed: a CUDA graph that was recorded may use it as long as the communicator lives.
// Fails on all ranks alike.
std::variant<std::shared_ptr<const SymmetricBuffer>, Failure> AllocateSymmetric(
    Communicator& communicator, int64_t nbytes, bool multicast, double timeout_s);

}  // namespace jcoll::gpu
