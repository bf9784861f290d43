// NCCL for ranks that are threads of one process. What the ranks tell each other (AllGather) and
// windows work; the other collectives are noted down.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cuda/ffi/nccl.h"

namespace fake {

namespace nccl = jcoll::gpu::nccl;

// A collective of NCCL's that a rank called.
struct HostCall {
  std::string name;
  size_t count;
  int type, op, peer;  // -1: the function has none.
  const void* from;
  void* to;
  cudaStream_t stream;
};

// Symmetric memory: one part per rank, and a handle for each.
struct Parts;

// The ranks that one communicator connects.
class Group {
 public:
  // In place of a former group, if one is given, whose communicators are destroyed: the new ones
  // have their addresses.
  explicit Group(int num_ranks, Group* former = nullptr);
  ~Group();
  nccl::Comm* comm(int rank) const { return comms_[rank].get(); }
  int num_ranks() const { return static_cast<int>(comms_.size()); }

  // What is wrong with it. Set before it is used.
  int count_says = 0;                 // CommCount, if not 0.
  std::map<int, int> user_rank_says;  // CommUserRank, by rank.
  int domain_size = 1 << 20;          // Ranks of one reach each other's memory.
  bool has_multicast = false;
  int registration_fails_on = -1;  // A rank.
  bool is_broken = false;          // CommGetAsyncError says so.
  bool is_nonblocking = false;     // Calls that wait for others return kInProgress at first.
  // What a rank gives to an exchange, on its way.
  std::function<void(int rank, std::string* part)> spoil;
  std::atomic<bool> hangs{false};  // Collectives for the program never end; may change at any time.

  // What happened.
  std::vector<HostCall> host_calls(int rank);
  int num_exchanges(int rank);                      // That the rank began.
  std::vector<size_t> registered_nbytes(int rank);  // In order.
  int num_lookups();                                // Of peers' addresses.

  // A rank's part of a window of XLA's: its `index`th. Another than before: XLA has freed that one.
  nccl::Window* AddXlaPart(int rank, size_t index, void* base);

 private:
  friend struct Functions;
  Parts& PartsAt(std::vector<std::unique_ptr<Parts>>& list, size_t index);

  std::vector<std::unique_ptr<nccl::Comm>> comms_;
  std::mutex mu_;
  std::condition_variable changed_;
  std::vector<std::vector<std::string>> exchanges_;  // By number, then rank.
  std::vector<std::unique_ptr<Parts>> windows_, xla_windows_;
  std::vector<std::vector<size_t>> registered_nbytes_;
  std::vector<std::vector<HostCall>> host_calls_;
  int num_lookups_ = 0;
  bool is_gone_ = false;
};

// A version with all that jcoll uses, and one that tells no addresses of peers.
const nccl::Api* NewNccl();
const nccl::Api* OldNccl();
// The multicast address of what lies at `offset` of any window.
void* MulticastAddress(size_t offset);

}  // namespace fake
