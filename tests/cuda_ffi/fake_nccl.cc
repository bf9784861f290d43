#include "fake_nccl.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <set>
#include <utility>

#include "fake_cuda.h"

struct jcoll::gpu::nccl::Comm {
  fake::Group* group;
  int rank;
  size_t num_exchanges = 0, num_windows = 0;
  bool is_in_progress = false;
  std::set<int> reductions = {};  // That users made.
};
struct jcoll::gpu::nccl::Window {
  fake::Parts* parts;
  int rank;
};

namespace fake {

struct Parts {
  Group* group;
  std::vector<char*> bases;
  std::vector<nccl::Window> handles;
  size_t num_there = 0;
};

constexpr nccl::Result kError = static_cast<nccl::Result>(3);  // ncclInternalError

struct Functions {
  // How a call that waits for other ranks returns.
  static nccl::Result Done(nccl::Comm* comm) {
    comm->is_in_progress = comm->group->is_nonblocking;
    return comm->is_in_progress ? nccl::kInProgress : nccl::kSuccess;
  }

  static const char* GetErrorString(nccl::Result) { return "internal error"; }
  static nccl::Result CommGetAsyncError(nccl::Comm* comm, nccl::Result* error) {
    *error = comm->is_in_progress ? nccl::kInProgress : nccl::kSuccess;
    if (comm->group->is_broken) *error = kError;
    comm->is_in_progress = false;
    return nccl::kSuccess;
  }
  static nccl::Result CommCount(const nccl::Comm* comm, int* count) {
    *count = comm->group->count_says ? comm->group->count_says : comm->group->num_ranks();
    return nccl::kSuccess;
  }
  static nccl::Result CommUserRank(const nccl::Comm* comm, int* rank) {
    const auto& says = comm->group->user_rank_says;
    const auto found = says.find(comm->rank);
    *rank = found == says.end() ? comm->rank : found->second;
    return nccl::kSuccess;
  }

  static nccl::Result Note(nccl::Comm* comm, HostCall call) {
    Group* group = comm->group;
    if (call.name != "AllGather") Enqueue(call.stream, [group] { return !group->hangs; });
    std::lock_guard<std::mutex> lock(group->mu_);
    group->host_calls_[comm->rank].push_back(std::move(call));
    return nccl::kSuccess;
  }
  static nccl::Result RedOpCreatePreMulSum(nccl::RedOp* op, void*, nccl::DataType, int,
                                           nccl::Comm* comm) {
    std::lock_guard<std::mutex> lock(comm->group->mu_);
    int number = 5;
    while (!comm->reductions.insert(number).second) ++number;
    *op = static_cast<nccl::RedOp>(number);
    return nccl::kSuccess;
  }
  static nccl::Result RedOpDestroy(nccl::RedOp op, nccl::Comm* comm) {
    std::lock_guard<std::mutex> lock(comm->group->mu_);
    return comm->reductions.erase(op) ? nccl::kSuccess : kError;
  }
  static nccl::Result GroupStart() { return nccl::kSuccess; }
  static nccl::Result GroupEnd() { return nccl::kSuccess; }
  static nccl::Result AllReduce(const void* from, void* to, size_t count, nccl::DataType type,
                                nccl::RedOp op, nccl::Comm* comm, cudaStream_t stream) {
    return Note(comm, {"AllReduce", count, type, op, -1, from, to, stream});
  }
  static nccl::Result ReduceScatter(const void* from, void* to, size_t count, nccl::DataType type,
                                    nccl::RedOp op, nccl::Comm* comm, cudaStream_t stream) {
    return Note(comm, {"ReduceScatter", count, type, op, -1, from, to, stream});
  }
  static nccl::Result Broadcast(const void* from, void* to, size_t count, nccl::DataType type,
                                int root, nccl::Comm* comm, cudaStream_t stream) {
    return Note(comm, {"Broadcast", count, type, -1, root, from, to, stream});
  }
  static nccl::Result Send(const void* from, size_t count, nccl::DataType type, int peer,
                           nccl::Comm* comm, cudaStream_t stream) {
    return Note(comm, {"Send", count, type, -1, peer, from, nullptr, stream});
  }
  static nccl::Result Recv(void* to, size_t count, nccl::DataType type, int peer, nccl::Comm* comm,
                           cudaStream_t stream) {
    return Note(comm, {"Recv", count, type, -1, peer, nullptr, to, stream});
  }

  static nccl::Result AllGather(const void* from, void* to, size_t nbytes, nccl::DataType type,
                                nccl::Comm* comm, cudaStream_t stream) {
    Note(comm, {"AllGather", nbytes, type, -1, -1, from, to, stream});
    const size_t number = comm->num_exchanges++;
    auto has_given = std::make_shared<bool>(false);
    Enqueue(stream, [=] {
      if (!*has_given) Give(comm, number, {static_cast<const char*>(from), nbytes});
      *has_given = true;
      return TakeAll(comm, number, static_cast<char*>(to), nbytes);
    });
    return Done(comm);
  }
  static void Give(nccl::Comm* comm, size_t number, std::string part) {
    Group& group = *comm->group;
    std::lock_guard<std::mutex> lock(group.mu_);
    if (group.spoil) group.spoil(comm->rank, &part);
    auto& exchanges = group.exchanges_;
    if (exchanges.size() <= number) exchanges.resize(number + 1);
    exchanges[number].resize(group.num_ranks());
    exchanges[number][comm->rank] = std::move(part);
  }
  static bool TakeAll(nccl::Comm* comm, size_t number, char* to, size_t nbytes) {
    std::lock_guard<std::mutex> lock(comm->group->mu_);
    const auto& parts = comm->group->exchanges_[number];
    if (std::any_of(parts.begin(), parts.end(), [](const auto& part) { return part.empty(); })) {
      return false;
    }
    for (size_t rank = 0; rank < parts.size(); ++rank) {
      if (parts[rank].size() != nbytes) std::abort();  // Where NCCL would hang, or worse.
      std::memcpy(to + rank * nbytes, parts[rank].data(), nbytes);
    }
    return true;
  }

  static nccl::Result MemAlloc(void** memory, size_t nbytes) {
    if (devices().allocation_fails_on == current_device()) return kError;
    *memory = NewMemory(nbytes);
    return nccl::kSuccess;
  }
  static nccl::Result MemFree(void*) { return nccl::kSuccess; }  // See NewMemory.

  static nccl::Result CommWindowRegister(nccl::Comm* comm, void* base, size_t nbytes,
                                         nccl::Window** window, int flags) {
    Group& group = *comm->group;
    if (group.registration_fails_on == comm->rank) return kError;
    if (flags != nccl::kSymmetricWindow || nbytes % 4096 != 0) return kError;
    std::unique_lock<std::mutex> lock(group.mu_);
    group.registered_nbytes_[comm->rank].push_back(nbytes);
    Parts& parts = group.PartsAt(group.windows_, comm->num_windows++);
    parts.bases[comm->rank] = static_cast<char*>(base);
    ++parts.num_there;
    group.changed_.notify_all();
    // As NCCL does: until all have come, but for one that fails and goes.
    const size_t expected = group.num_ranks() - (group.registration_fails_on >= 0);
    group.changed_.wait(lock, [&] { return parts.num_there >= expected; });
    *window = &parts.handles[comm->rank];
    return Done(comm);
  }

  static nccl::Result GetPeerDevicePointer(nccl::Window* window, size_t offset, int peer,
                                           void** address) {
    Group& group = *window->parts->group;
    std::lock_guard<std::mutex> lock(group.mu_);
    if (group.is_gone_) std::abort();  // A window that was freed.
    ++group.num_lookups_;
    const bool reaches = window->rank / group.domain_size == peer / group.domain_size;
    *address = reaches ? window->parts->bases[peer] + offset : nullptr;
    return nccl::kSuccess;
  }
  static nccl::Result GetLsaMultimemDevicePointer(nccl::Window* window, size_t offset,
                                                  void** address) {
    if (!window->parts->group->has_multicast) return kError;
    *address = MulticastAddress(offset);
    return nccl::kSuccess;
  }

  static nccl::Api OldApi() {
    nccl::Api api;
    api.version = 22703;
    api.GetErrorString = GetErrorString;
    api.CommGetAsyncError = CommGetAsyncError;
    api.CommCount = CommCount;
    api.CommUserRank = CommUserRank;
    api.GroupStart = GroupStart;
    api.GroupEnd = GroupEnd;
    api.AllReduce = AllReduce;
    api.ReduceScatter = ReduceScatter;
    api.AllGather = AllGather;
    api.Broadcast = Broadcast;
    api.Send = Send;
    api.Recv = Recv;
    api.RedOpCreatePreMulSum = RedOpCreatePreMulSum;
    api.RedOpDestroy = RedOpDestroy;
    return api;
  }
  static nccl::Api NewApi() {
    nccl::Api api = OldApi();
    api.version = 22903;
    api.MemAlloc = MemAlloc;
    api.MemFree = MemFree;
    api.CommWindowRegister = CommWindowRegister;
    api.GetPeerDevicePointer = GetPeerDevicePointer;
    api.GetLsaMultimemDevicePointer = GetLsaMultimemDevicePointer;
    return api;
  }
};

Group::Group(int num_ranks, Group* former) : registered_nbytes_(num_ranks), host_calls_(num_ranks) {
  if (former != nullptr) {
    comms_ = std::move(former->comms_);
    former->is_gone_ = true;
  }
  for (int rank = 0; rank < num_ranks; ++rank) {
    if (former == nullptr) comms_.push_back(std::make_unique<nccl::Comm>());
    *comms_[rank] = nccl::Comm{this, rank};
  }
}
Group::~Group() = default;

// With mu_ held.
Parts& Group::PartsAt(std::vector<std::unique_ptr<Parts>>& list, size_t index) {
  while (list.size() <= index) {
    auto parts = std::make_unique<Parts>();
    parts->group = this;
    parts->bases.resize(num_ranks());
    for (int rank = 0; rank < num_ranks(); ++rank) parts->handles.push_back({parts.get(), rank});
    list.push_back(std::move(parts));
  }
  return *list[index];
}

std::vector<HostCall> Group::host_calls(int rank) {
  std::lock_guard<std::mutex> lock(mu_);
  return host_calls_[rank];
}

int Group::num_exchanges(int rank) {
  std::lock_guard<std::mutex> lock(mu_);
  return static_cast<int>(comms_[rank]->num_exchanges);
}

std::vector<size_t> Group::registered_nbytes(int rank) {
  std::lock_guard<std::mutex> lock(mu_);
  return registered_nbytes_[rank];
}

int Group::num_lookups() {
  std::lock_guard<std::mutex> lock(mu_);
  return num_lookups_;
}

nccl::Window* Group::AddXlaPart(int rank, size_t index, void* base) {
  std::lock_guard<std::mutex> lock(mu_);
  Parts& parts = PartsAt(xla_windows_, index);
  parts.bases[rank] = static_cast<char*>(base);
  return &parts.handles[rank];
}

const nccl::Api* NewNccl() {
  static const nccl::Api api = Functions::NewApi();
  return &api;
}

const nccl::Api* OldNccl() {
  static const nccl::Api api = Functions::OldApi();
  return &api;
}

void* MulticastAddress(size_t offset) { return reinterpret_cast<void*>(0xca570000 + offset); }

}  // namespace fake
