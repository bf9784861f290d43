#pragma once

#include <string>
#include <vector>

namespace jcoll::gpu {

// What went wrong in kernels of this process since it began: a text per communicator that is dead.
// Empty: all is well. Asks no device and waits for none.
std::vector<std::string> CheckHealth();

}  // namespace jcoll::gpu
