// A communicator that XLA owns, seen from one of its ranks, and what the ranks tell each other
// through it before a collective can run.
#pragma once

#include <cstdint>
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

// What an exchange is about: ranks that are not at the same one must not take each other's words.
enum class Topic : uint32_t { kVerdict, kRankFacts, kReach, kAnnouncement };

// Not thread-safe, except for Check. Calls marked "collective" must be made by all ranks in the
// same order. They wait for the others on the host, with a deadline, and so belong in Initialize.
//
// A rank whose exchange has failed may have left NCCL's part of it in flight, which would be taken
// for the next one's. So the first failure is that of all later exchanges.
class Communicator {
 public:
  // From here on IsSame tells, whatever fails afterwards.
  static std::variant<std::unique_ptr<Communicator>, Failure> Open(const nccl::Api* api,
                                                                   nccl::Comm* comm);

  // Before all that follows. The communicator's device is current. Fails if it has not `num_ranks`
  // ranks.
  //
  // This rank is the place of the device in its group, as XLA makes communicators in the order of
  // the groups' ids. That the device is the one which the program takes for this rank cannot be
  // seen from here: a handler is not told its device's logical id.
  std::optional<Failure> SetUp(int num_ranks);

  int rank() const { return rank_; }
  int num_ranks() const { return num_ranks_; }
  const nccl::Api& api() const { return *api_; }
  nccl::Comm* comm() const { return comm_; }
  cudaStream_t stream() const { return stream_; }
  // Device memory for the one number that a barrier by NCCL reduces.
  void* barrier_word() const { return word_; }

  // What a call of NCCL's returned, once it is done: a communicator may be a non-blocking one.
  std::optional<Failure> Check(const char* what, nccl::Result result, double timeout_s) const;

  // Whether NCCL's communicator is still the one that was opened: XLA may have destroyed it, and
  // NCCL made another at its address. Asks no other rank.
  bool IsSame();

  // Collective: everybody gets everybody's value, by rank. Fails where ranks are at different
  // exchanges. T::kTopic says what it is about.
  template <typename T>
  std::variant<std::vector<T>, Failure> Exchange(const T& mine, double timeout_s) {
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= kMaxNbytes);
    std::vector<T> all(num_ranks_);
    Message message = {{num_exchanges_, T::kTopic}, {}};
    std::memcpy(message.bytes, &mine, sizeof(T));
    if (auto failure = ExchangeMessages(message, timeout_s)) return *failure;
    for (int rank = 0; rank < num_ranks_; ++rank) {
      std::memcpy(&all[rank], host_[1 + rank].bytes, sizeof(T));
    }
    return all;
  }

  // Device memory with a copy of `words`. It is never freed, as that of SymmetricBuffer. Waits for
  // no rank: what goes wrong is to be told to the others (AllWell).
  std::variant<void*, Failure> Upload(const std::vector<int32_t>& words, double timeout_s);

  // Copies device memory to page-locked memory of the host.
  std::optional<Failure> Download(void* host, const void* memory, size_t nbytes, double timeout_s);

  // Collective: nothing if all ranks are well, else on all ranks what the first of them suffers.
  std::optional<Failure> AllWell(const std::optional<Failure>& mine, double timeout_s);

 private:
  static constexpr size_t kMaxNbytes = 248;  // Of one rank's part in an exchange.

  // Of one size, whatever it says: ranks at different exchanges must find that out, and not have
  // NCCL gather different numbers of bytes.
  struct Head {
    uint32_t number;
    Topic topic;
  };
  struct Message {
    Head head;
    char bytes[kMaxNbytes];
  };

  Communicator(const nccl::Api* api, nccl::Comm* comm) : api_(api), comm_(comm) {}
  std::optional<Failure> ReadRank(int expected_ranks);
  std::optional<Failure> Allocate();
  std::optional<Failure> Mark();
  // Leaves all ranks' in host_.
  std::optional<Failure> ExchangeMessages(const Message& mine, double timeout_s);
  std::optional<Failure> Gather(const Message& mine, double timeout_s);
  // asks_nccl: whether it has failed. Not for copies: XLA may have destroyed the communicator of a
  // clique that has a failure to tell.
  std::optional<Failure> WaitForStream(double timeout_s, bool asks_nccl) const;

  const nccl::Api* api_;
  nccl::Comm* comm_;
  int rank_ = 0, num_ranks_ = 1;
  cudaStream_t stream_ = {};
  nccl::RedOp mark_ = nccl::kSum;  // kSum: there is none.
  uint32_t num_exchanges_ = 0;
  std::optional<Failure> broken_;
  // Room for one's own message, and then for all ranks'. On the host page-locked, or copies would
  // block.
  Message* host_ = nullptr;
  Message* device_ = nullptr;
  void* word_ = nullptr;
};

}  // namespace jcoll::gpu
