#include "cuda/ffi/clique.h"

#include <algorithm>
#include <cstring>

#include "csrc/failure_report.h"
#include "cuda/ffi/dump.h"
#include "cuda/ffi/error_text.h"
#include "cuda/ffi/log_once.h"

namespace jcoll::gpu {
namespace {

constexpr int kOldestCapability = 80;
constexpr int kMulticastCapability = 90;
constexpr size_t kMaxRememberedBuffers = 4096;
constexpr size_t kMaxRememberedCalls = 16;

// What a rank tells the others about itself.
struct RankFacts {
  static constexpr Topic kTopic = Topic::kRankFacts;
  int32_t rank;
  int32_t nccl_version;
  int32_t has_peer_pointers;
  int32_t compute_capability;
  int32_t num_sms;
  // Of this build: kernels of different sources may not understand each other.
  char sources[24];
  char no_code[144];  // Why this build has no kernels for the device.
};

// Whom a rank reaches.
struct Reach {
  static constexpr Topic kTopic = Topic::kReach;
  int32_t num_peers, multicast;
};

// Collective: what a rank has made, if all have; else the same failure on all of them.
template <typename T>
std::variant<T, Failure> IfAllWell(Communicator& communicator, std::variant<T, Failure> made,
                                   double timeout_s) {
  std::optional<Failure> failure;
  if (const auto* found = std::get_if<Failure>(&made)) failure = *found;
  if (auto ill = communicator.AllWell(failure, timeout_s)) return *ill;
  return made;
}

// The facts of one whom all ranks can play: the least of each.
RankFacts Weakest(const std::vector<RankFacts>& all) {
  RankFacts least = all[0];
  for (const RankFacts& other : all) {
    least.nccl_version = std::min(least.nccl_version, other.nccl_version);
    least.has_peer_pointers = std::min(least.has_peer_pointers, other.has_peer_pointers);
    least.compute_capability = std::min(least.compute_capability, other.compute_capability);
    least.num_sms = std::min(least.num_sms, other.num_sms);
  }
  return least;
}

std::optional<Failure> CheckFacts(const std::vector<RankFacts>& all) {
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].rank != static_cast<int32_t>(rank)) {
      return Failure{FailureCode::kInternal,
                     "jcoll: what rank " + std::to_string(rank) +
                         " of a communicator sends says "
                         "that it is from rank " +
                         std::to_string(all[rank].rank) +
                         ".\n  NCCL and XLA disagree about the ranks; use algorithm=\"xla\"."};
    }
    if (std::strcmp(all[rank].sources, all[0].sources) != 0) {
      return Failure{FailureCode::kInternal,
                     "jcoll: ranks 0 and " + std::to_string(rank) +
                         " run different builds of jcoll's CUDA library (of sources " +
                         all[0].sources + " and " + all[rank].sources +
                         ").\n  Install the same on all hosts."};
    }
  }
  return std::nullopt;
}

std::string WhyNoKernels(const std::vector<RankFacts>& all, const RankFacts& weakest) {
  const int num_ranks = static_cast<int>(all.size());
  if (num_ranks > kMaxRanks) {
    return "the group has " + std::to_string(num_ranks) + " ranks, and kernels serve at most " +
           std::to_string(kMaxRanks);
  }
  if (!weakest.has_peer_pointers) {
    return "NCCL " + nccl::VersionText(weakest.nccl_version) +
           " does not tell the addresses of peers' memory (" +
           nccl::VersionText(nccl::kPeerPointersVersion) + " does)";
  }
  if (weakest.compute_capability < kOldestCapability) {
    return "a device of the group has compute capability " +
           std::to_string(weakest.compute_capability / 10) + "." +
           std::to_string(weakest.compute_capability % 10) + ", and kernels need 8.0";
  }
  for (int rank = 0; rank < num_ranks; ++rank) {
    const std::string no_code = all[rank].no_code;
    if (!no_code.empty()) return "on rank " + std::to_string(rank) + " " + no_code;
  }
  return "";
}

}  // namespace

std::optional<Failure> Clique::Join(const CallSite& site) {
  std::lock_guard<std::mutex> lock(together_mu_);
  if (!has_joined_) {
    has_joined_ = true;
    join_failure_ = JoinOnce(site);
  }
  if (!join_failure_ && !site.is_by_nccl() && !has_looked_for_peers_) {
    has_looked_for_peers_ = true;
    if (offer_.no_kernels.empty()) join_failure_ = FindPeers(site.timeout_seconds());
  }
  return join_failure_;
}

std::optional<Failure> Clique::JoinOnce(const CallSite& site) {
  const double timeout_s = site.timeout_seconds();
  const auto api = nccl::Get();
  if (auto* failure = std::get_if<Failure>(&api)) return *failure;
  // What this takes, the ranks have nothing to tell each other by: if it fails on one, the others
  // find out by their deadline.
  auto opened = Communicator::Open(std::get<const nccl::Api*>(api), comm_);
  if (auto* failure = std::get_if<Failure>(&opened)) return *failure;
  communicator_ = std::move(std::get<std::unique_ptr<Communicator>>(opened));
  auto failure = communicator_->SetUp(static_cast<int>(site.group_size));
  if (failure) return failure;
  void *host = nullptr, *on_device = nullptr;
  failure =
      communicator_->AllWell(device::AllocateHost(sizeof(OnHost), &host, &on_device), timeout_s);
  if (failure) return failure;
  error_on_device_ = &static_cast<OnHost*>(on_device)->error;
  {
    std::lock_guard<std::mutex> lock(mu_);  // Fault looks at it, from any thread.
    on_host_ = static_cast<OnHost*>(host);
  }
  return Meet(communicator_->api(), timeout_s);
}

// Fills in offer_ by what the ranks tell of themselves.
std::optional<Failure> Clique::Meet(const nccl::Api& api, double timeout_s) {
  DeviceFacts device;
  auto failure = communicator_->AllWell(device::GetFacts(&device), timeout_s);
  if (failure) return failure;
  RankFacts mine = {};
  mine.rank = communicator_->rank();
  mine.nccl_version = api.version;
  mine.has_peer_pointers = api.has_peer_pointers();
  mine.compute_capability = device.compute_capability;
  mine.num_sms = device.num_sms;
  std::strncpy(mine.sources, JCOLL_CUDA_SOURCES, sizeof(mine.sources) - 1);
  device::WhyNoCode(device.compute_capability).copy(mine.no_code, sizeof(mine.no_code) - 1);
  auto exchanged = communicator_->Exchange(mine, timeout_s);
  if (auto* bad = std::get_if<Failure>(&exchanged)) return *bad;
  const auto& all = std::get<std::vector<RankFacts>>(exchanged);
  if (auto bad = CheckFacts(all)) return bad;
  const RankFacts weakest = Weakest(all);
  const bool is_mixed = std::any_of(all.begin(), all.end(), [&weakest](const RankFacts& facts) {
    return facts.compute_capability != weakest.compute_capability ||
           facts.num_sms != weakest.num_sms;
  });
  if (is_mixed) {
    LogOnce("a group has GPUs of different kinds; all of them run what the least of them can");
  }
  offer_.num_ranks = communicator_->num_ranks();
  offer_.device = {weakest.compute_capability, weakest.num_sms};
  offer_.no_kernels = WhyNoKernels(all, weakest);
  return std::nullopt;
}

// Makes the signal pads, and sees by them whether the ranks reach each other's memory.
std::optional<Failure> Clique::FindPeers(double timeout_s) {
  const bool may_multicast = offer_.device.compute_capability >= kMulticastCapability;
  auto made = AllocateSymmetric(*communicator_, sizeof(SignalPad), may_multicast, timeout_s);
  if (auto* failure = std::get_if<Failure>(&made)) {
    if (failure->code == FailureCode::kDeadlineExceeded) return *failure;
    // On all ranks alike, so that NCCL's own collectives still serve.
    offer_.no_kernels = "no memory could be registered with NCCL (" + failure->message + ")";
    return std::nullopt;
  }
  pads_ = std::get<std::shared_ptr<const SymmetricBuffer>>(made);
  const auto end = pads_->pointers.of_rank + offer_.num_ranks;
  const auto num_null = std::count(pads_->pointers.of_rank, end, nullptr);
  const Reach mine = {offer_.num_ranks - static_cast<int32_t>(num_null),
                      pads_->pointers.multicast != nullptr};
  auto exchanged = communicator_->Exchange(mine, timeout_s);
  if (auto* failure = std::get_if<Failure>(&exchanged)) return *failure;
  offer_.multicast = true;
  for (const Reach& reach : std::get<std::vector<Reach>>(exchanged)) {
    offer_.multicast = offer_.multicast && reach.multicast;
    if (reach.num_peers < offer_.num_ranks) {
      offer_.no_kernels = "not all ranks of the group reach each other's memory (NVLink)";
    }
  }
  return std::nullopt;
}

Clique::Memory Clique::Grow(std::shared_ptr<const SymmetricBuffer>* have, int64_t nbytes,
                            double timeout_s) {
  if (*have != nullptr && (*have)->nbytes >= nbytes) return *have;
  // Twice as much, so that the sum of what is left behind is less than what is in use.
  if (*have != nullptr) nbytes = std::max(nbytes, 2 * (*have)->nbytes);
  auto made = AllocateSymmetric(*communicator_, nbytes, offer_.multicast, timeout_s);
  if (auto* memory = std::get_if<std::shared_ptr<const SymmetricBuffer>>(&made)) *have = *memory;
  return made;
}

Clique::Memory Clique::Scratch(Kernel kernel, int64_t nbytes, double timeout_s) {
  std::lock_guard<std::mutex> lock(together_mu_);
  return Grow(&scratch_[kernel], nbytes, timeout_s);
}

Clique::Memory Clique::Staging(Side side, int64_t nbytes, double timeout_s) {
  std::lock_guard<std::mutex> lock(together_mu_);
  return Grow(&staging_[side], nbytes, timeout_s);
}

// By the address on the next rank, which like all of them moves with the window.
std::optional<Failure> Clique::IsStillThere(const WindowAt& at, const PeerPointers& known,
                                            bool* is) {
  const int next = (rank() + 1) % offer_.num_ranks;
  void* now = nullptr;
  const nccl::Result result =
      communicator_->api().GetPeerDevicePointer(at.window, at.offset, next, &now);
  *is = now == known.of_rank[next];
  return communicator_->Check("ncclGetPeerDevicePointer", result, 1);
}

std::variant<PeerPointers, Failure> Clique::PointersOf(const WindowAt& at, bool is_first) {
  const auto key = std::make_pair(at.window, at.offset);
  {
    std::lock_guard<std::mutex> lock(mu_);
    const auto known = pointers_.find(key);
    if (known != pointers_.end()) {
      bool is_valid = true;
      if (is_first) {
        if (auto failure = IsStillThere(at, known->second, &is_valid)) return *failure;
      }
      if (is_valid) return known->second;
    }
  }
  auto read = ReadPointers(*communicator_, at.window, at.offset, offer_.multicast);
  if (auto* failure = std::get_if<Failure>(&read)) return *failure;
  const auto& pointers = std::get<PeerPointers>(read);
  const auto end = pointers.of_rank + offer_.num_ranks;
  if (std::find(pointers.of_rank, end, nullptr) != end) {
    return Failure{FailureCode::kInternal,
                   "jcoll: a peer's part of a window cannot be reached, though its signal pad can."
                   "\n  Use algorithm=\"xla\"."};
  }
  std::lock_guard<std::mutex> lock(mu_);
  // What is forgotten is asked for again; who never stops to use new buffers must not fill memory.
  if (pointers_.size() >= kMaxRememberedBuffers) pointers_.clear();
  return pointers_[key] = pointers;
}

void Clique::FillPeers(PeerTable* peers) const {
  peers->rank = communicator_->rank();
  peers->num_ranks = offer_.num_ranks;
  for (int rank = 0; rank < offer_.num_ranks; ++rank) {
    peers->pad[rank] = static_cast<SignalPad*>(pads_->pointers.of_rank[rank]);
  }
  peers->error = error_on_device_;
}

bool Clique::HasOpened() {
  std::lock_guard<std::mutex> lock(together_mu_);
  return communicator_ != nullptr;
}

bool Clique::IsCurrent() {
  std::lock_guard<std::mutex> lock(together_mu_);
  return communicator_ != nullptr && communicator_->IsSame();
}

std::variant<void*, Failure> Clique::Upload(const std::vector<int32_t>& words, double timeout_s) {
  std::lock_guard<std::mutex> lock(together_mu_);
  auto uploaded = communicator_->Upload(words, timeout_s);
  return IfAllWell(*communicator_, std::move(uploaded), timeout_s);
}

std::variant<HostWatch::Marks, Failure> Clique::Watch(const CallSite& site) {
  std::lock_guard<std::mutex> lock(together_mu_);
  const double timeout_s = site.timeout_seconds();
  if (watch_ == nullptr) {
    watch_ = new HostWatch([this](uint32_t op_id, double waited_s) { Late(op_id, waited_s); });
    StartLooking(watch_);
  }
  auto marks = watch_->Register(site.op_id, timeout_s, [&](const std::vector<int32_t>& words) {
    return communicator_->Upload(words, timeout_s);
  });
  return IfAllWell(*communicator_, std::move(marks), timeout_s);
}

void Clique::NoteCall(uint32_t op_id) {
  std::lock_guard<std::mutex> lock(mu_);
  last_calls_.push_back(op_id);
  if (last_calls_.size() > kMaxRememberedCalls) last_calls_.pop_front();
}

// On the watch's thread. The program's own may be waiting for the stream, and so tell nobody.
void Clique::Late(uint32_t op_id, double timeout_s) {
  const std::string text = LateText(op_id, rank(), device_, timeout_s);
  {
    std::lock_guard<std::mutex> lock(mu_);
    if (fault_) return;
    fault_ = Failure{FailureCode::kDeadlineExceeded, text};
  }
  LogOnce(text + Known(text));
}

// For the log: the last calls and, where a kernel failed, the signal pad of its block; or in which
// report they are.
std::string Clique::Known(const std::string& error) {
  std::vector<uint32_t> calls;
  {
    std::lock_guard<std::mutex> lock(mu_);
    calls.assign(last_calls_.begin(), last_calls_.end());
  }
  const auto pad_failure = ReadPad();
  const SignalPad* pad = pad_failure ? nullptr : &on_host_->pad;
  const uint32_t block = pad == nullptr ? 0 : on_host_->error.block;
  const JsonFields fields = {
      {"device", std::to_string(device_)},
      {"last_calls", LastCallsJson(calls)},
      {"signal_pad", pad == nullptr ? "null" : CountersJson(*pad, block, offer_.num_ranks)}};
  const std::string path = ReportFailure(error, fields);
  if (!path.empty()) return "\n  The last calls and counters are in " + path + ".";
  const std::string text = LastCallsText(calls);
  if (pad != nullptr) return text + CountersText(*pad, block, offer_.num_ranks);
  return pad_failure->message.empty()
             ? text
             : text + "\n  The signal pad could not be read: " + pad_failure->message;
}

// Into on_host_->pad. A failure without a text: there is none that could be read now.
std::optional<Failure> Clique::ReadPad() {
  // Not if another thread waits for the ranks just now: its exchange may never end.
  std::unique_lock<std::mutex> together(together_mu_, std::try_to_lock);
  if (!together.owns_lock() || pads_ == nullptr) return Failure{FailureCode::kInternal, ""};
  constexpr double kPatience = 1;
  const device::Scoped current(device_);
  return communicator_->Download(&on_host_->pad, pads_->pointers.of_rank[rank()], sizeof(SignalPad),
                                 kPatience);
}

std::optional<Failure> Clique::Fault(bool is_caller) {
  constexpr uint32_t kComplete = 2;
  std::string first_seen;
  {
    std::lock_guard<std::mutex> lock(mu_);
    const bool has_failed = on_host_ != nullptr &&
                            __atomic_load_n(&on_host_->error.state, __ATOMIC_ACQUIRE) == kComplete;
    if (!fault_ && !has_failed) return std::nullopt;
    if (!fault_) {
      fault_ = ErrorOf(on_host_->error, device_);
      first_seen = fault_->message;
    }
  }
  if (!first_seen.empty()) LogOnce(first_seen + Known(first_seen));
  std::lock_guard<std::mutex> lock(mu_);
  if (!is_caller || !fault_was_told_) {
    fault_was_told_ = fault_was_told_ || is_caller;
    return fault_;
  }
  return Failure{FailureCode::kInternal,
                 "jcoll: this communicator takes no more calls, since an earlier one failed: " +
                     fault_->message.substr(0, fault_->message.find('\n'))};
}

namespace {

// What a call says of its communicator, and all that there is before XLA lends it. Programs on
// other devices say the same of another one.
using GroupsName = std::tuple<int, std::vector<int64_t>, int64_t, int64_t>;

struct Cliques {
  std::mutex mu;
  std::map<std::pair<int, nccl::Comm*>, std::shared_ptr<Clique>> by_communicator;
  // XLA made their communicators anew. What they own is left behind: a CUDA graph that was recorded
  // may still use it. What they have to tell about a failure is not forgotten.
  std::vector<std::shared_ptr<Clique>> former;
  std::map<GroupsName, std::string> no_windows;
};
GroupsName NameOf(int device, const CallSite& site) {
  return {device, site.groups, site.group_size, site.communication_id};
}
Cliques& GetCliques() {
  static Cliques* cliques = new Cliques();  // XLA's threads may outlive static destructors.
  return *cliques;
}

}  // namespace

std::shared_ptr<Clique> CliqueFor(int device, nccl::Comm* comm) {
  Cliques& cliques = GetCliques();
  const auto key = std::make_pair(device, comm);
  std::shared_ptr<Clique> found;
  {
    std::lock_guard<std::mutex> lock(cliques.mu);
    const auto at = cliques.by_communicator.find(key);
    if (at != cliques.by_communicator.end()) found = at->second;
  }
  // Without the lock, as it may wait for a thread that waits for other ranks. Nobody else replaces
  // the clique meanwhile: a device's programs are initialized one at a time.
  if (found != nullptr && found->IsCurrent()) return found;
  const bool is_kept = found != nullptr && found->HasOpened();
  auto made = std::make_shared<Clique>(device, comm);
  std::lock_guard<std::mutex> lock(cliques.mu);
  if (is_kept) cliques.former.push_back(std::move(found));
  return cliques.by_communicator[key] = std::move(made);
}

void ForgoWindows(int device, const CallSite& site, const std::string& why) {
  Cliques& cliques = GetCliques();
  std::lock_guard<std::mutex> lock(cliques.mu);
  cliques.no_windows[NameOf(device, site)] = why;
}

std::string WhyNoWindows(int device, const CallSite& site) {
  Cliques& cliques = GetCliques();
  std::lock_guard<std::mutex> lock(cliques.mu);
  const auto found = cliques.no_windows.find(NameOf(device, site));
  return found == cliques.no_windows.end() ? "" : found->second;
}

std::vector<std::shared_ptr<Clique>> AllCliques() {
  Cliques& cliques = GetCliques();
  std::lock_guard<std::mutex> lock(cliques.mu);
  std::vector<std::shared_ptr<Clique>> all = cliques.former;
  for (const auto& [key, clique] : cliques.by_communicator) all.push_back(clique);
  return all;
}

}  // namespace jcoll::gpu
