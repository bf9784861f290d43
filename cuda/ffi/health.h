#pragma once

#include <string>
#include <vector>

namespace jcoll::gpu {

// What went wrong in kernels and NCCL's collectives of this process since it began: a text per
// communicator that is dead. Empty: all is well. Asks no device and waits for none, but once where
// a failure is first seen, at most a second, for what is logged of it.
std::vector<std::string> CheckHealth();

}  // namespace jcoll::gpu
