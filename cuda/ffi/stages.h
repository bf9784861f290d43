// What one collective instruction does in each stage of XLA's, on every device of the process.
//
//   Prepare     asks XLA for the communicator, and for windows over the call's buffers
//   Initialize  the first time: the ranks meet, compare their programs and agree on a route;
//               memory is registered. Later: makes sure that what is remembered still holds.
//   Execute     puts a kernel, copies or NCCL's functions on the stream. Waits for nobody, and does
//               the same operations each time: it may be recorded into a CUDA graph.
//
// Between nodes: the "hierarchical" algorithm is composed where the program is lowered (jcoll/ops),
// of calls over the devices of a node, which take kernels here, and calls over the rails between
// nodes, which have groups and so communicators of their own and take NCCL's functions.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <variant>

#include "cuda/ffi/call_site.h"
#include "cuda/ffi/clique.h"
#include "cuda/ffi/collectives.h"
#include "cuda/ffi/route.h"

namespace jcoll::gpu {

class Stages {
 public:
  // `site` is resolved.
  explicit Stages(CallSite site) : site_(std::move(site)) {}

  const CallSite& site() const { return site_; }

  // Thread-safe; for one device one at a time.
  std::optional<Failure> Prepare(Collectives& xla, int device, const Buffers& buffers);
  std::optional<Failure> Initialize(Collectives& xla, int device, const Buffers& buffers);
  std::optional<Failure> Execute(Collectives& xla, int device, const Buffers& buffers,
                                 cudaStream_t stream);

 private:
  // What the ranks agreed on, as one device keeps it. Not changed once it is made.
  struct Agreement {
    std::shared_ptr<Clique> clique;
    Route route;
    Call call;                                             // All but the buffers.
    std::shared_ptr<const SymmetricBuffer> input, output;  // kStaging.
  };
  using AgreementOr = std::variant<std::shared_ptr<const Agreement>, Failure>;

  std::shared_ptr<const Agreement> Find(int device);
  AgreementOr Agree(Collectives& xla, int device, const Buffers& buffers,
                    std::shared_ptr<Clique> clique);
  // Collective: all ranks are at the same call. Gives *no_windows: the same on all ranks.
  std::optional<Failure> CompareRanks(Clique& clique, std::string* no_windows) const;
  std::optional<Failure> AddMemory(Agreement* agreement) const;
  // Why the buffers are in no windows of XLA's; empty: they are.
  std::string WhyNoWindows(Collectives& xla, int device, const Buffers& buffers);
  std::optional<Failure> FillWindows(Collectives& xla, Clique& clique, const Buffers& buffers,
                                     bool is_first, PeerTable* peers) const;
  std::optional<Failure> Launch(Collectives& xla, const Agreement& agreement,
                                const Buffers& buffers, cudaStream_t stream) const;
  std::optional<Failure> CopyIn(const Agreement& agreement, const Buffers& buffers,
                                cudaStream_t stream) const;

  const CallSite site_;
  std::mutex mu_;
  std::map<int, std::shared_ptr<const Agreement>> agreements_;  // By device.
  std::map<int, std::string> refused_windows_;  // By device: why XLA did not take the request.
};

}  // namespace jcoll::gpu
