// Collectives by NCCL's own functions, on the stream of the call: where they are asked for, as
// between NVLink domains, and where our kernels do not serve. NCCL waits for ranks without a
// deadline (see host_watch.h).
#pragma once

#include <optional>
#include <string>

#include "cuda/ffi/call_site.h"
#include "cuda/ffi/communicator.h"
#include "cuda/ffi/host_watch.h"

namespace jcoll::gpu {

// Why NCCL has no function for a call; nothing if it has.
std::optional<std::string> HostCallsRefusal(const CallSite& site);

// In what NCCL's results are not what jcoll promises; "" if they are.
std::string HostCallsCaveat(const CallSite& site);

// Asynchronous. Precondition: no refusal. `marks`: by which the collective is watched.
std::optional<Failure> RunHostCalls(const CallSite& site, const Communicator& communicator,
                                    const HostWatch::Marks& marks, const Buffers& buffers,
                                    cudaStream_t stream);

}  // namespace jcoll::gpu
