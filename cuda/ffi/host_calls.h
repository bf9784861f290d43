// Collectives by NCCL's own functions, on the stream of the call: where our kernels cannot reach
// the peers, as between nodes. NCCL adds 16-bit floats in their own precision, rounding at every
// rank, and guards only by its own deadline against ranks that do not come.
#pragma once

#include <optional>
#include <string>

#include "cuda/ffi/call_site.h"
#include "cuda/ffi/communicator.h"

namespace jcoll::gpu {

// Why NCCL has no function for a call; nothing if it has.
std::optional<std::string> HostCallsRefusal(const CallSite& site);

// Asynchronous. Precondition: no refusal.
std::optional<Failure> RunHostCalls(const CallSite& site, const Communicator& communicator,
                                    const Buffers& buffers, cudaStream_t stream);

}  // namespace jcoll::gpu
