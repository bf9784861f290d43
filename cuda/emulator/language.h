// What stands for the CUDA language in host C++: qualifiers, built-in variables and block barriers.
// A CUDA thread is a thread of the operating system, so that ThreadSanitizer sees what races.
#pragma once

#include <cstdint>

#include "cuda/emulator/runtime_types.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)

// One dimension is all that the kernels use.
struct EmulatedIndex {
  uint32_t x = 0;
};
inline thread_local EmulatedIndex threadIdx, blockIdx, blockDim, gridDim;

void __syncthreads();
int __syncthreads_or(int predicate);

namespace jcoll::emulator {

// Every instruction that other threads can see the order of begins with it: here a thread is
// delayed, and here a block that a test stops stops.
void Step();
// What a thread that waits does between two looks.
void Pause();

// A thread is about to read or to write so many bytes of data, perhaps another rank's.
void CountLoad(const void* p, int64_t nbytes);
void CountStore(const void* p, int64_t nbytes);

// The addresses behind a multicast address, one per rank; see Multicast in emulator.h.
struct Replicas {
  void* const* addresses;
  int num_ranks;
  int64_t offset;
  char* operator[](int rank) const { return static_cast<char*>(addresses[rank]) + offset; }
};
Replicas Resolve(const void* multicast_address);

}  // namespace jcoll::emulator
