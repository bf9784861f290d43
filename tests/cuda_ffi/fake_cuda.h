// A CUDA runtime on the host, as far as cuda/ffi/device.h asks for one. Memory is the host's; of
// streams there are two kinds to link, fake_streams.cc and emulated_streams.cc.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <string>

#include "cuda/kernels/launch.h"

namespace fake {

// What the devices are like, and what fails. Set between runs.
struct Devices {
  std::map<int, jcoll::gpu::DeviceFacts> facts;  // By ordinal; others: the default.
  bool is_shareable = true;                      // XLA's memory.
  int allocation_fails_on = -1;                  // ncclMemAlloc, on a device.
  int memory_is_full_on = -1;                    // cudaMalloc, on a device.
  std::map<int, std::string> no_code;            // Why there are no kernels, by capability.
};
Devices& devices();

// The calling thread's current device.
int current_device();

// Of a stream: true once the operation is done, which may depend on other ranks.
using Step = std::function<bool()>;
void Enqueue(cudaStream_t stream, Step step);
cudaStream_t NewStream(int device);
// Runs what can be run; whether nothing is left.
bool Advance(cudaStream_t stream);

// Memory that lives as long as the process, as a device's would.
void* NewMemory(size_t nbytes);

}  // namespace fake
