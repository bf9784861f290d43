// The CUDA language for both of its compilers: nvcc, and a host compiler with the emulator.
#pragma once

#include <cstring>
#include <functional>

#include "cuda/runtime_api.h"

#ifdef JCOLL_EMULATOR
#include "cuda/emulator/emulator.h"
#include "cuda/emulator/language.h"
#define JCOLL_UNROLL
// A function whose stores may race with others by design; ThreadSanitizer does not look at them.
#define JCOLL_RACY __attribute__((no_sanitize("thread")))
#else
#include <cuda_runtime.h>
#define JCOLL_UNROLL _Pragma("unroll")
#define JCOLL_RACY
#endif

namespace jcoll::gpu {

// 16 warps: enough loads in flight to fill a link with few blocks, and 128 registers a thread.
constexpr int kThreadsPerBlock = 512;

// kernel<<<num_blocks, kThreadsPerBlock, 0, stream>>>(args)
template <typename Args>
cudaError_t LaunchOn(cudaStream_t stream, int num_blocks, void (*kernel)(Args), const Args& args) {
#ifdef JCOLL_EMULATOR
  stream->Enqueue(num_blocks, [kernel, args] { kernel(args); });
  return cudaSuccess;
#else
  void* parameters[] = {const_cast<Args*>(&args)};
  return cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(num_blocks),
                          dim3(kThreadsPerBlock), parameters, 0, stream);
#endif
}

// The first thread of the grid, the number of threads: for loops that deal work to all of them.
__device__ inline int64_t GridThread() { return int64_t{blockIdx.x} * blockDim.x + threadIdx.x; }
__device__ inline int64_t GridThreads() { return int64_t{gridDim.x} * blockDim.x; }

}  // namespace jcoll::gpu
