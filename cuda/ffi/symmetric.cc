#include "cuda/ffi/symmetric.h"

#include <algorithm>
#include <utility>

namespace jcoll::gpu {
namespace {

constexpr int64_t kAlignment = 4096;  // NCCL_WIN_REQUIRED_ALIGNMENT
constexpr double kAtOnce = 10;        // Seconds, for what waits for nobody.

std::optional<Failure> AllocateZeroed(const Communicator& communicator, int64_t nbytes,
                                      void** memory) {
  const nccl::Api& api = communicator.api();
  auto failure = communicator.Check("ncclMemAlloc", api.MemAlloc(memory, nbytes), kAtOnce);
  return failure ? failure : device::Zero(*memory, nbytes, communicator.stream());
}

}  // namespace

std::variant<PeerPointers, Failure> ReadPointers(const Communicator& communicator,
                                                 nccl::Window* window, size_t offset,
                                                 bool multicast) {
  const nccl::Api& api = communicator.api();
  PeerPointers pointers;
  // First, so that no failure of one rank's keeps it from what all ranks do together. An error is
  // like no address: there are machines whose switch is in a bad state.
  if (multicast &&
      api.GetLsaMultimemDevicePointer(window, offset, &pointers.multicast) != nccl::kSuccess) {
    pointers.multicast = nullptr;
  }
  for (int rank = 0; rank < communicator.num_ranks(); ++rank) {
    const nccl::Result result =
        api.GetPeerDevicePointer(window, offset, rank, &pointers.of_rank[rank]);
    auto failure = communicator.Check("ncclGetPeerDevicePointer", result, kAtOnce);
    if (failure) return *failure;
  }
  return pointers;
}

std::variant<std::shared_ptr<const SymmetricBuffer>, Failure> AllocateSymmetric(
    Communicator& communicator, int64_t nbytes, bool multicast, double timeout_s) {
  auto buffer = std::make_shared<SymmetricBuffer>();
  buffer->nbytes = (std::max<int64_t>(nbytes, 1) + kAlignment - 1) / kAlignment * kAlignment;
  // Whoever fails must not leave the others waiting in the registration, which has no deadline.
  void* memory = nullptr;
  auto failure =
      communicator.AllWell(AllocateZeroed(communicator, buffer->nbytes, &memory), timeout_s);
  if (failure) {
    if (memory != nullptr) communicator.api().MemFree(memory);
    return *failure;
  }
  const nccl::Result result = communicator.api().CommWindowRegister(
      communicator.comm(), memory, buffer->nbytes, &buffer->window, nccl::kSymmetricWindow);
  failure = communicator.Check("ncclCommWindowRegister", result, timeout_s);
  if (!failure) {
    auto pointers = ReadPointers(communicator, buffer->window, 0, multicast);
    if (auto* bad = std::get_if<Failure>(&pointers)) {
      failure = std::move(*bad);
    } else {
      buffer->pointers = std::get<PeerPointers>(pointers);
    }
  }
  // In the stream's order after the zeroing, so that nobody returns before all memory is zero.
  failure = communicator.AllWell(failure, timeout_s);
  if (failure) return *failure;
  return std::shared_ptr<const SymmetricBuffer>(std::move(buffer));
}

}  // namespace jcoll::gpu
