#pragma once

#include <cstdint>
#include <string>

#include "csrc/failure.h"
#include "cuda/kernels/peer_table.h"

namespace jcoll::gpu {

// What a kernel left in its record, for people: where, who, what it needed and saw, what to do.
Failure ErrorOf(const ErrorRecord& record, int device);

// The same of a collective of NCCL's that has not ended in time, of which no more is known.
std::string LateText(uint32_t op_id, int rank, int device, double timeout_s);

}  // namespace jcoll::gpu
