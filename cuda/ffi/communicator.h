// A communicator that XLA owns, seen from one of its ranks, and what the ranks tell each other
// through it before a collective can run.
#pragma once

#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <variant>
#include <vector>

#include "csrc/failure.h"
#include "cuda/ffi/device.h"
#include "cuda/ffi/nccl.h"

namespace jcoll::gpu {

// Not thread-safe, except for Check. Calls marked "collective" must be made by all ranks in the
// same order. They wait for the others on the host, with a deadline, and so belong in Initialize.
class Communicator {
 public:
  // The communicator's device is current. Fails if it has not `num_ranks` ranks.
  //
  // This rank is the place of the device in its group, as XLA makes communicators in the order of
  // the groups' ids. That the device is the one which the program takes for this rank cannot be
  // seen from here: a handler is not told its device's logical id.
  static std::variant<std::unique_ptr<Communicator>, Failure> Open(const nccl::Api* api,
                                                                   nccl::Comm* comm, int num_ranks);

  int rank() const { return rank_; }
  int num_ranks() const { return num_ranks_; }
  const nccl::Api& api() const { return *api_; }
  nccl::Comm* comm() const { return comm_; }
  cudaStream_t stream() const { return stream_; }
  // Device memory for the one number that a barrier by NCCL reduces.
  void* barrier_word() const { return word_; }

  // What a call of NCCL's returned, once it is done: a communicator may be a non-blocking one.
  std::optional<Failure> Check(const char* what, nccl::Result result, double timeout_s) const;

  // Collective: everybody gets everybody's value, by rank.
  template <typename T>
  std::variant<std::vector<T>, Failure> Exchange(const T& mine, double timeout_s) {
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= kMaxNbytes);
    std::vector<T> all(num_ranks_);
    if (auto failure = ExchangeBytes(&mine, sizeof(T), all.data(), timeout_s)) return *failure;
    return all;
  }

  // Device memory with a copy of `words`. It is never freed, as that of SymmetricBuffer.
  std::variant<void*, Failure> Upload(const std::vector<int32_t>& words, double timeout_s);

  // Collective: nothing if all ranks are well, else on all ranks what the first of them suffers.
  std::optional<Failure> AllWell(const std::optional<Failure>& mine, double timeout_s);

 private:
  static constexpr size_t kMaxNbytes = 256;  // Of one rank's part in an exchange.

  Communicator(const nccl::Api* api, nccl::Comm* comm) : api_(api), comm_(comm) {}
  std::optional<Failure> ReadRank(int expected_ranks);
  std::optional<Failure> Allocate();
  std::optional<Failure> ExchangeBytes(const void* mine, size_t nbytes, void* all,
                                       double timeout_s);
  std::optional<Failure> WaitForStream(double timeout_s) const;

  const nccl::Api* api_;
  nccl::Comm* comm_;
  int rank_ = 0, num_ranks_ = 1;
  cudaStream_t stream_ = {};
  // Room for one part, and then for all ranks'. On the host page-locked, or copies would block.
  char* host_ = nullptr;
  char* device_ = nullptr;
  void* word_ = nullptr;
};

}  // namespace jcoll::gpu
