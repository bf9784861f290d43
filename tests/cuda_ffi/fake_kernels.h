// Kernels that note down what they were given and do nothing.
#pragma once

#include <vector>

#include "cuda/kernels/launch.h"

namespace fake {

struct Launched {
  jcoll::gpu::Call call;
  cudaStream_t stream;
  int device;  // The current one.
};
// Since it was last asked, by rank: one launch of each rank in order.
std::vector<Launched> TakeLaunched();

// From now on the kernel refuses every call.
void Refuse(jcoll::gpu::Kernel kernel);
// Nothing launched, nothing refused.
void ResetKernels();

}  // namespace fake
