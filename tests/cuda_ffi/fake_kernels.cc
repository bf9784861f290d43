#include "fake_kernels.h"

#include <algorithm>
#include <mutex>
#include <set>

#include "fake_cuda.h"

namespace fake {
namespace {

std::mutex g_mu;
std::vector<Launched> g_launched;
std::set<jcoll::gpu::Kernel> g_refused;

}  // namespace

std::vector<Launched> TakeLaunched() {
  std::lock_guard<std::mutex> lock(g_mu);
  std::vector<Launched> taken;
  std::swap(taken, g_launched);
  std::stable_sort(taken.begin(), taken.end(),
                   [](const Launched& a, const Launched& b) { return a.device < b.device; });
  return taken;
}

void Refuse(jcoll::gpu::Kernel kernel) {
  std::lock_guard<std::mutex> lock(g_mu);
  g_refused.insert(kernel);
}

void ResetKernels() {
  std::lock_guard<std::mutex> lock(g_mu);
  g_launched.clear();
  g_refused.clear();
}

}  // namespace fake

namespace jcoll::gpu {

const char* Name(Kernel kernel) {
  return kernel == Kernel::kAllReduceOneShotLL ? "all_reduce_one_shot_ll" : "a kernel";
}

std::optional<std::string> Refusal(const Call& call, const DeviceFacts&) {
  std::lock_guard<std::mutex> lock(fake::g_mu);
  if (fake::g_refused.count(call.kernel)) return "kernel refuses the call";
  if (call.kernel == Kernel::kPlanSimple || call.kernel == Kernel::kPlanLL) {
    if (call.program == nullptr) return "there is no program";
  }
  return std::nullopt;
}

int64_t ScratchNbytes(const Call& call) {
  return call.kernel == Kernel::kAllReduceOneShotLL
             ? 2 * call.count * Size(call.dtype) * call.peers.num_ranks
             : 0;
}

int BlocksFor(const Call&, const DeviceFacts& device) { return std::min(device.num_sms, 64); }

cudaError_t Launch(const Call& call, cudaStream_t stream) {
  fake::Enqueue(stream, [call, stream, device = fake::current_device()] {
    std::lock_guard<std::mutex> lock(fake::g_mu);
    fake::g_launched.push_back({call, stream, device});
    return true;
  });
  return cudaSuccess;
}

}  // namespace jcoll::gpu
