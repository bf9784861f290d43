// The few things asked of the CUDA runtime. device.cc implements them with CUDA; the tests have an
// implementation of their own.
#pragma once

#include <cstddef>
#include <optional>
#include <string>

#include "csrc/failure.h"
#include "cuda/kernels/launch.h"  // DeviceFacts, cudaStream_t, cudaError_t

namespace jcoll::gpu::device {

// While it lives, the calling thread's current device.
class Scoped {
 public:
  explicit Scoped(int ordinal);
  ~Scoped();
  Scoped(const Scoped&) = delete;
  Scoped& operator=(const Scoped&) = delete;

 private:
  int saved_ = 0;
};

// `what` failed with `error`; nothing if it did not.
std::optional<Failure> Check(const char* what, cudaError_t error);

// Of the current device.
std::optional<Failure> GetFacts(DeviceFacts* facts);
// Why this build has no kernels for a GPU of a compute capability; empty: it has.
std::string WhyNoCode(int compute_capability);
std::optional<Failure> Allocate(size_t nbytes, void** memory);
// Page-locked host memory, zeroed, that the device can read and write at *device.
std::optional<Failure> AllocateHost(size_t nbytes, void** host, void** device);
std::optional<Failure> NewStream(cudaStream_t* stream);

// Whether the memory was allocated such that other devices and processes may map it.
bool IsShareable(const void* memory);

// Asynchronous, in stream order.
std::optional<Failure> Copy(void* to, const void* from, size_t nbytes, cudaStream_t stream);
std::optional<Failure> Zero(void* memory, size_t nbytes, cudaStream_t stream);
// Whether all work on the stream is done.
std::optional<Failure> IsDone(cudaStream_t stream, bool* is_done);

}  // namespace jcoll::gpu::device
