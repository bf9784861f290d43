// One rank of a clique (the devices of a communicator) with all that lasts between calls: the
// signal pads, the scratch and staging windows, the addresses of peers' buffers, the record of
// what went wrong.
//
// Kept per device and communicator, and made anew where XLA has made its communicator anew, be it
// at the same address. The groups that a call names do not tell the communicator: they are numbers
// of devices in a program, which may be other devices in the next one. XLA runs the programs that
// share a clique in the same order on all ranks, and one at a time in their early stages: so the
// collective calls here match.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "cuda/ffi/call_site.h"
#include "cuda/ffi/collectives.h"
#include "cuda/ffi/communicator.h"
#include "cuda/ffi/host_watch.h"
#include "cuda/ffi/route.h"
#include "cuda/ffi/symmetric.h"

namespace jcoll::gpu {

class Clique {
 public:
  using Memory = std::variant<std::shared_ptr<const SymmetricBuffer>, Failure>;

  Clique(int device, nccl::Comm* comm) : device_(device), comm_(comm) {}

  // Collective, when it is first called: finds out who the ranks are and what they can do together.
  // Later calls return the same, as a rank that tried again would be alone. Whether they reach each
  // other's memory is found out for the first site that could use it: NCCL alone needs no window,
  // and between nodes one is better not asked for.
  std::optional<Failure> Join(const CallSite& site);
  // Whether it has come as far as to own something.
  bool HasOpened();

  // Whether it is of the communicator that is at this address now, and not of an earlier one that
  // XLA had. Not if that cannot be told, as NCCL could not be used when it was made: another one
  // tries then, alone until its deadline where only this rank had failed.
  bool IsCurrent();

  // From here on: after Join succeeded. What the offer says of peers' memory is known only once a
  // site has joined that is not by NCCL.
  const Offer& offer() const { return offer_; }
  const Communicator& communicator() const { return *communicator_; }
  int rank() const { return communicator_->rank(); }

  // Collective: everybody gets everybody's value, by rank.
  template <typename T>
  std::variant<std::vector<T>, Failure> Exchange(const T& mine, double timeout_s) {
    std::lock_guard<std::mutex> lock(together_mu_);
    return communicator_->Exchange(mine, timeout_s);
  }

  // Collective: a plan's image in device memory. Fails on all ranks alike.
  std::variant<void*, Failure> Upload(const std::vector<int32_t>& words, double timeout_s);

  // Collective: gives NCCL's collectives of a call site its deadline. Fails on all ranks alike.
  std::variant<HostWatch::Marks, Failure> Watch(const CallSite& site);

  // Collective: memory of at least so many bytes that every rank reaches. What is there grows, and
  // is shared by all calls that ask for the same use.
  //
  // A kernel's scratch is its own, since flags that it left there must stay what they were.
  Memory Scratch(Kernel kernel, int64_t nbytes, double timeout_s);
  enum class Side { kInput, kOutput };
  Memory Staging(Side side, int64_t nbytes, double timeout_s);

  // The addresses on all ranks of a buffer in a window of XLA's; asked for once per buffer. With
  // `is_first` (in Initialize) makes sure that what is remembered still holds: XLA may have freed
  // the window, and made another with the same handle.
  std::variant<PeerPointers, Failure> PointersOf(const WindowAt& at, bool is_first);

  // Everything in a kernel's peer table but the buffers.
  void FillPeers(PeerTable* peers) const;

  // Notes a call for what is logged when one fails: the last few that were put on a stream, or
  // recorded into a graph.
  void NoteCall(uint32_t op_id);

  // Why no more calls can be made; nothing as long as they can. The first failure is told in full
  // once, to the caller with `is_caller`, and what is known of it is logged when it is first seen.
  std::optional<Failure> Fault(bool is_caller);

 private:
  std::optional<Failure> JoinOnce(const CallSite& site);
  std::optional<Failure> Meet(const nccl::Api& api, double timeout_s);
  std::optional<Failure> FindPeers(double timeout_s);
  Memory Grow(std::shared_ptr<const SymmetricBuffer>* have, int64_t nbytes, double timeout_s);
  std::optional<Failure> IsStillThere(const WindowAt& at, const PeerPointers& known, bool* is);
  void Late(uint32_t op_id, double timeout_s);
  std::string Known(const std::string& error);
  std::optional<Failure> ReadPad();

  // What kernels write on the host, and where a copy of the signal pad goes.
  struct OnHost {
    ErrorRecord error;
    SignalPad pad;
  };

  const int device_;
  nccl::Comm* const comm_;

  std::mutex together_mu_;  // Held while ranks wait for each other; hence not the one below.
  bool has_joined_ = false, has_looked_for_peers_ = false;
  std::optional<Failure> join_failure_;
  std::unique_ptr<Communicator> communicator_;
  Offer offer_;
  std::shared_ptr<const SymmetricBuffer> pads_;
  OnHost* on_host_ = nullptr;
  ErrorRecord* error_on_device_ = nullptr;  // on_host_->error as kernels see it.
  HostWatch* watch_ = nullptr;              // Of NCCL's collectives. Never freed: see there.

  std::map<Kernel, std::shared_ptr<const SymmetricBuffer>> scratch_;
  std::map<Side, std::shared_ptr<const SymmetricBuffer>> staging_;

  std::mutex mu_;
  std::map<std::pair<nccl::Window*, size_t>, PeerPointers> pointers_;
  std::optional<Failure> fault_;
  bool fault_was_told_ = false;
  std::deque<uint32_t> last_calls_;  // Their op_ids.
};

// The clique of a communicator on a device.
std::shared_ptr<Clique> CliqueFor(int device, nccl::Comm* comm);
// All that there have been, for CheckHealth.
std::vector<std::shared_ptr<Clique>> AllCliques();

// What all ranks of a call's groups know: some rank gets no windows from XLA for any call, and why.
// Registering windows makes XLA wait for all ranks without a deadline, so that nobody must ask for
// them then. By groups, as it is needed before XLA lends the communicator: what the ranks of one
// communicator know, those of another that has groups of the same names may not.
void ForgoWindows(int device, const CallSite& site, const std::string& why);
// "": nothing of the kind is known.
std::string WhyNoWindows(int device, const CallSite& site);

}  // namespace jcoll::gpu
