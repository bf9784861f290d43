// What one collective instruction does in each stage of XLA's, on every device of the process.
//
//   Prepare     asks XLA for the communicator, and for windows over the call's buffers
//   Initialize  the first time: the ranks meet, compare their programs and agree on a route;
//               memory is registered. Later: makes sure that what is remembered still holds, and
//               tells of a failure, as nothing but this is called where a CUDA graph is replayed.
//   Execute     puts a kernel, copies or NCCL's functions on the stream. Waits for nobody, and does
//               the same operations each time: it may be recorded into a CUDA graph.
//
// For the same reason the ranks never change the route once they have agreed on it: one might
// replay what it has recorded, while another executes anew.
//
// Between nodes nothing runs here: "hierarchical" is composed where the program is lowered
// (jcoll/ops), of calls over the devices of a node, which come here, and of XLA's own collectives
// over the rails between nodes.
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
    HostWatch::Marks marks;                                // kHostCalls.
  };
  using AgreementOr = std::variant<std::shared_ptr<const Agreement>, Failure>;

  // Where in XLA's windows the buffers lie. A peer's is found at the own place in the peer's part
  // of the window: so it has to be the same on all ranks.
  struct Places {
    int64_t input = -1, output = -1;  // -1: in no window, or empty.
    bool operator==(const Places& other) const {
      return input == other.input && output == other.output;
    }
  };
  // What a rank has of windows for a call.
  struct Windows {
    Places places;
    std::string missing;    // Why the buffers are in none; empty: they are.
    bool for_good = false;  // And so it is for all calls of this rank.
  };

  struct OfDevice {
    std::shared_ptr<const Agreement> agreement;
    Places compared;              // By all ranks, last.
    std::string refused_windows;  // Until the ranks have agreed: why XLA did not take the request.
  };

  OfDevice Find(int device);
  void Keep(int device, const OfDevice& kept);
  AgreementOr Agree(Collectives& xla, int device, const Buffers& buffers,
                    std::shared_ptr<Clique> clique, Places* compared);
  // Collective: all ranks are at the same call. Makes windows->missing the same on all of them.
  std::optional<Failure> CompareRanks(Clique& clique, Windows* windows) const;
  std::optional<Failure> ComparePlaces(Collectives& xla, int device, const Buffers& buffers);
  std::optional<Failure> AddMemory(Agreement* agreement) const;
  std::optional<Failure> AddStaging(Agreement* agreement) const;
  // Whether this rank can ask for windows.
  Windows CanAsk(Collectives& xla, int device, const Buffers& buffers);
  Windows FindWindows(Collectives& xla, int device, const Buffers& buffers);
  std::optional<Failure> FillWindows(Collectives& xla, Clique& clique, const Buffers& buffers,
                                     bool is_first, PeerTable* peers) const;
  std::optional<Failure> Launch(Collectives& xla, const Agreement& agreement,
                                const Buffers& buffers, cudaStream_t stream) const;
  std::optional<Failure> CopyIn(const Agreement& agreement, const Buffers& buffers,
                                cudaStream_t stream) const;

  const CallSite site_;
  std::mutex mu_;
  std::map<int, OfDevice> of_device_;
};

}  // namespace jcoll::gpu
