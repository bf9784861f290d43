#include "fake_cuda.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <vector>

#include "cuda/ffi/device.h"

namespace fake {
namespace {

thread_local int t_device = 0;

std::mutex g_mu;

}  // namespace

Devices& devices() {
  static Devices devices;
  return devices;
}

int current_device() { return t_device; }

void* NewMemory(size_t nbytes) {
  static auto* all = new std::vector<std::unique_ptr<char[]>>();
  std::lock_guard<std::mutex> lock(g_mu);
  all->push_back(std::unique_ptr<char[]>(new char[nbytes + 1]));
  // Not zero, as nobody said that it is; as far as anybody looks.
  std::memset(all->back().get(), 0xa5, std::min<size_t>(nbytes, 1 << 20));
  return all->back().get();
}

}  // namespace fake

namespace jcoll::gpu::device {

Scoped::Scoped(int ordinal) : saved_(fake::t_device) { fake::t_device = ordinal; }
Scoped::~Scoped() { fake::t_device = saved_; }

std::optional<Failure> Check(const char* what, cudaError_t error) {
  if (error == cudaSuccess) return std::nullopt;
  return Failure{FailureCode::kInternal, std::string("jcoll: ") + what + " failed"};
}

std::optional<Failure> GetFacts(DeviceFacts* facts) {
  const auto& known = fake::devices().facts;
  const auto found = known.find(fake::t_device);
  if (found != known.end()) *facts = found->second;
  return std::nullopt;
}

std::string WhyNoCode(int compute_capability) {
  const auto found = fake::devices().no_code.find(compute_capability);
  return found == fake::devices().no_code.end() ? "" : found->second;
}

std::optional<Failure> Allocate(size_t nbytes, void** memory) {
  if (fake::devices().memory_is_full_on == fake::t_device) {
    return Failure{FailureCode::kInternal, "jcoll: cudaMalloc failed: out of memory"};
  }
  *memory = fake::NewMemory(nbytes);
  return std::nullopt;
}

std::optional<Failure> AllocateHost(size_t nbytes, void** host, void** device) {
  *host = *device = fake::NewMemory(nbytes);
  std::memset(*host, 0, nbytes);
  return std::nullopt;
}

std::optional<Failure> NewStream(cudaStream_t* stream) {
  *stream = fake::NewStream(fake::t_device);
  return std::nullopt;
}

bool IsShareable(const void*) { return fake::devices().is_shareable; }

std::optional<Failure> Copy(void* to, const void* from, size_t nbytes, cudaStream_t stream) {
  if (nbytes == sizeof(uint32_t)) {  // Words are stored whole, as the host may be looking.
    fake::Enqueue(stream, [=] {
      const uint32_t word = *static_cast<const uint32_t*>(from);
      __atomic_store_n(static_cast<uint32_t*>(to), word, __ATOMIC_RELEASE);
      return true;
    });
    return std::nullopt;
  }
  fake::Enqueue(stream, [=] { return std::memcpy(to, from, nbytes), true; });
  return std::nullopt;
}

std::optional<Failure> Zero(void* memory, size_t nbytes, cudaStream_t stream) {
  fake::Enqueue(stream, [=] { return std::memset(memory, 0, nbytes), true; });
  return std::nullopt;
}

std::optional<Failure> IsDone(cudaStream_t stream, bool* is_done) {
  *is_done = fake::Advance(stream);
  return std::nullopt;
}

}  // namespace jcoll::gpu::device
