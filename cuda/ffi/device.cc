#include "cuda/ffi/device.h"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <cstring>
#include <string>

#include "cuda/ffi/architectures.h"

namespace jcoll::gpu::device {

Scoped::Scoped(int ordinal) {
  cudaGetDevice(&saved_);
  cudaSetDevice(ordinal);
}
Scoped::~Scoped() { cudaSetDevice(saved_); }

std::optional<Failure> Check(const char* what, cudaError_t error) {
  if (error == cudaSuccess) return std::nullopt;
  return Failure{FailureCode::kInternal, std::string("jcoll: ") + what +
                                             " failed: " + cudaGetErrorName(error) + ": " +
                                             cudaGetErrorString(error)};
}

std::optional<Failure> GetFacts(DeviceFacts* facts) {
  int device = 0, major = 0, minor = 0;
  auto attribute = [&device](cudaDeviceAttr which, int* value) {
    return Check("cudaDeviceGetAttribute", cudaDeviceGetAttribute(value, which, device));
  };
  if (auto failure = Check("cudaGetDevice", cudaGetDevice(&device))) return failure;
  if (auto failure = attribute(cudaDevAttrComputeCapabilityMajor, &major)) return failure;
  if (auto failure = attribute(cudaDevAttrComputeCapabilityMinor, &minor)) return failure;
  facts->compute_capability = 10 * major + minor;
  return attribute(cudaDevAttrMultiProcessorCount, &facts->num_sms);
}

std::string WhyNoCode(int compute_capability) {
  return gpu::WhyNoCode(JCOLL_CUDA_ARCHITECTURES, compute_capability);
}

std::optional<Failure> Allocate(size_t nbytes, void** memory) {
  return Check("cudaMalloc", cudaMalloc(memory, nbytes));
}

std::optional<Failure> AllocateHost(size_t nbytes, void** host, void** device) {
  auto failure = Check("cudaHostAlloc", cudaHostAlloc(host, nbytes, cudaHostAllocMapped));
  if (failure) return failure;
  std::memset(*host, 0, nbytes);
  return Check("cudaHostGetDevicePointer", cudaHostGetDevicePointer(device, *host, 0));
}

std::optional<Failure> NewStream(cudaStream_t* stream) {
  return Check("cudaStreamCreateWithFlags",
               cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking));
}

// Only the driver knows. It is loaded wherever a device is in use, and is not linked against: the
// library must load without one.
bool IsShareable(const void* memory) {
  using Attribute = CUresult (*)(void*, CUpointer_attribute, CUdeviceptr);
  static const Attribute get = [] {
    void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    return driver == nullptr ? nullptr
                             : reinterpret_cast<Attribute>(dlsym(driver, "cuPointerGetAttribute"));
  }();
  unsigned long long handle_types = 0;  // NOLINT(runtime/int): the driver's type.
  const auto address = reinterpret_cast<CUdeviceptr>(memory);
  return get != nullptr &&
         get(&handle_types, CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES, address) == CUDA_SUCCESS &&
         handle_types != 0;
}

std::optional<Failure> Copy(void* to, const void* from, size_t nbytes, cudaStream_t stream) {
  return Check("cudaMemcpyAsync", cudaMemcpyAsync(to, from, nbytes, cudaMemcpyDefault, stream));
}

std::optional<Failure> Zero(void* memory, size_t nbytes, cudaStream_t stream) {
  return Check("cudaMemsetAsync", cudaMemsetAsync(memory, 0, nbytes, stream));
}

std::optional<Failure> IsDone(cudaStream_t stream, bool* is_done) {
  const cudaError_t error = cudaStreamQuery(stream);
  *is_done = error == cudaSuccess;
  if (error == cudaErrorNotReady) return std::nullopt;
  return Check("cudaStreamQuery", error);
}

}  // namespace jcoll::gpu::device
