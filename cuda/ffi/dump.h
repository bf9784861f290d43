// What is known besides a failure itself, in lines to be logged after its text.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cuda/kernels/peer_table.h"

namespace jcoll::gpu {

// The calls that were put on the stream last: their op_ids, the oldest first.
std::string LastCallsText(const std::vector<uint32_t>& calls);

// A block's counters in this rank's signal pad.
std::string CountersText(const SignalPad& pad, uint32_t block, int num_ranks);

}  // namespace jcoll::gpu
