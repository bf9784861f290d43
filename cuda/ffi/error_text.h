#pragma once

#include <string>

#include "cuda/kernels/peer_table.h"

namespace jcoll::gpu {

// What a kernel left in its record, for people: where, who, what it needed and saw, what to do.
std::string ErrorText(const ErrorRecord& record, int device);

}  // namespace jcoll::gpu
