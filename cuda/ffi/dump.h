#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cuda/kernels/peer_table.h"

namespace jcoll::gpu {

// What is known besides a failure itself, in lines to be logged after its text: the calls that were
// put on the stream last (op_ids, the oldest first), and a block's counters in this rank's signal
// pad. `pad` is null where it could not be read.
std::string KnownText(const std::vector<uint32_t>& calls, const SignalPad* pad, uint32_t block,
                      int num_ranks);

}  // namespace jcoll::gpu
