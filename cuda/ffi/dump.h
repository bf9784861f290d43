// What is known besides a failure itself, in lines to be logged after its text.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cuda/kernels/peer_table.h"

namespace jcoll::gpu {

// The calls that were put on the stream last: their op_ids, the oldest first.
std::string LastCallsText(const std::vector<uint32_t>& calls);

// The same for a report: texts in JSON, and the counters as an object.
std::string LastCallsJson(const std::vector<uint32_t>& calls);
std::string CountersJson(const SignalPad& pad, uint32_t block, int num_ranks);

// A block's counters in this rank's signal pad.
std::string CountersText(const SignalPad& pad, uint32_t block, int num_ranks);

}  // namespace jcoll::gpu
