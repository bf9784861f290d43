// One CUDA GPU for all ranks, under the names of gpu.h. Memory is managed, so that the tests read
// and write it as they do the emulator's.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "cuda/kernels/launch.h"

namespace world {

constexpr bool kIsEmulated = false;

inline void Check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s failed: %s: %s\n", what, cudaGetErrorName(error),
               cudaGetErrorString(error));
  std::exit(3);
}

// Ranks wait for each other inside of kernels. So their streams must not share a queue of the
// hardware, and the first launch of a kernel must not wait until nothing runs, to load it. CUDA
// reads both when it starts.
inline void Start() {
  static const bool started = [] {
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
    setenv("CUDA_MODULE_LOADING", "EAGER", 1);
    int can_share = 0;
    Check(cudaDeviceGetAttribute(&can_share, cudaDevAttrConcurrentManagedAccess, 0),
          "cudaDeviceGetAttribute");
    if (can_share == 0) {
      std::fprintf(stderr, "this GPU and host cannot use managed memory at the same time\n");
      std::exit(3);
    }
    return true;
  }();
  static_cast<void>(started);
}

inline void* AllocateShared(int64_t nbytes) {
  Start();
  void* memory = nullptr;
  Check(cudaMallocManaged(&memory, static_cast<size_t>(nbytes), cudaMemAttachGlobal),
        "cudaMallocManaged");
  return memory;
}

// Memory of one rank, zeroed; the address is `misalignment` past a multiple of 16.
class Buffer {
 public:
  Buffer(int, int64_t nbytes, int misalignment = 0)
      : memory_(AllocateShared(nbytes + misalignment + 1)),
        data_(static_cast<char*>(memory_) + misalignment),
        nbytes_(nbytes) {
    std::memset(data_, 0, static_cast<size_t>(nbytes));
  }
  ~Buffer() { cudaFree(memory_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  void* data() const { return data_; }
  int64_t nbytes() const { return nbytes_; }

 private:
  void* memory_;
  char* data_;
  int64_t nbytes_;
};

// The host's memory, which kernels see too.
inline void* AllocateOnHost(int64_t nbytes) {
  Start();
  void* memory = nullptr;
  Check(cudaHostAlloc(&memory, static_cast<size_t>(nbytes), cudaHostAllocMapped), "cudaHostAlloc");
  return memory;
}

template <typename T, void* (*kAllocate)(int64_t), cudaError_t (*kFree)(void*)>
struct AllocatorBy {
  using value_type = T;
  template <typename U>
  struct rebind {
    using other = AllocatorBy<U, kAllocate, kFree>;
  };
  AllocatorBy() = default;
  template <typename U>
  AllocatorBy(const AllocatorBy<U, kAllocate, kFree>&) {}
  T* allocate(size_t count) {
    return static_cast<T*>(kAllocate(static_cast<int64_t>(count * sizeof(T))));
  }
  void deallocate(T* p, size_t) { kFree(p); }
  friend bool operator==(const AllocatorBy&, const AllocatorBy&) { return true; }
  friend bool operator!=(const AllocatorBy&, const AllocatorBy&) { return false; }
};
// Of memory that kernels see too; the latter where jcoll's own is the host's.
template <typename T>
using Allocator = AllocatorBy<T, AllocateShared, cudaFree>;
template <typename T>
using HostAllocator = AllocatorBy<T, AllocateOnHost, cudaFreeHost>;

// There is no switch between the ranks of one GPU; see CanRun in world.h.
class Multicast {
 public:
  Multicast(const std::vector<void*>&, int64_t) {}
  void* address() const { return nullptr; }
};

class Stream {
 public:
  explicit Stream(int) {
    Start();
    Check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  }
  ~Stream() { cudaStreamDestroy(stream_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  cudaStream_t handle() const { return stream_; }
  void Synchronize() { Check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize"); }

 private:
  cudaStream_t stream_ = nullptr;
};
inline cudaStream_t Handle(Stream& stream) { return stream.handle(); }

inline int Attribute(cudaDeviceAttr which) {
  Start();
  int value = 0;
  Check(cudaDeviceGetAttribute(&value, which, 0), "cudaDeviceGetAttribute");
  return value;
}
inline jcoll::gpu::DeviceFacts Facts() {
  return {10 * Attribute(cudaDevAttrComputeCapabilityMajor) +
              Attribute(cudaDevAttrComputeCapabilityMinor),
          Attribute(cudaDevAttrMultiProcessorCount)};
}

// How long kernels wait for each other, if a test does not say it. A tool that runs launches one
// after the other sets it, so that they do not wait for long.
inline uint64_t TimeoutNs() {
  const char* seconds = std::getenv("JCOLL_TIMEOUT");
  return static_cast<uint64_t>((seconds == nullptr ? 60 : std::atof(seconds)) * 1e9);
}

// A kernel has as many threads as it is compiled for.
inline void UseThreads(int = 0) {}

// Nobody counts the traffic of a real GPU.
struct Traffic {
  int64_t loaded = 0, stored = 0;
};
inline Traffic TrafficOf(int) { return {}; }
inline void ResetTraffic() {}

// How long the device takes to copy so many bytes.
inline double CopySeconds(void* to, const void* from, int64_t nbytes) {
  Stream stream(0);
  cudaEvent_t begin, end;
  Check(cudaEventCreate(&begin), "cudaEventCreate");
  Check(cudaEventCreate(&end), "cudaEventCreate");
  Check(cudaEventRecord(begin, stream.handle()), "cudaEventRecord");
  Check(cudaMemcpyAsync(to, from, static_cast<size_t>(nbytes), cudaMemcpyDefault, stream.handle()),
        "cudaMemcpyAsync");
  Check(cudaEventRecord(end, stream.handle()), "cudaEventRecord");
  stream.Synchronize();
  float ms = 0;
  Check(cudaEventElapsedTime(&ms, begin, end), "cudaEventElapsedTime");
  Check(cudaEventDestroy(begin), "cudaEventDestroy");
  Check(cudaEventDestroy(end), "cudaEventDestroy");
  return ms / 1e3;
}

}  // namespace world
