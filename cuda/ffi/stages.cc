#include "cuda/ffi/stages.h"

#include <algorithm>
#include <vector>

#include "cuda/ffi/host_calls.h"

namespace jcoll::gpu {
namespace {

// What a rank says about its next call.
struct Announcement {
  static constexpr Topic kTopic = Topic::kAnnouncement;
  uint64_t fingerprint;
  int64_t input_place, output_place;
  int32_t misses_windows, for_good;
  char why_not[200];
};

bool Overlap(const BufferView& a, const BufferView& b) {
  const auto* first = static_cast<const char*>(a.data);
  const auto* second = static_cast<const char*>(b.data);
  return first < second + b.nbytes && second < first + a.nbytes;
}

// The buffers that peers may touch.
std::vector<Region> Regions(const Buffers& buffers) {
  std::vector<Region> regions;
  for (const BufferView* view : {&buffers.inputs[0], &buffers.outputs[0]}) {
    if (view->nbytes == 0) continue;
    regions.push_back({view->data, static_cast<size_t>(view->nbytes)});
  }
  return regions;
}

void FillStaging(const SymmetricBuffer& input, const SymmetricBuffer& output, PeerTable* peers) {
  for (int rank = 0; rank < peers->num_ranks; ++rank) {
    peers->input[rank] = input.pointers.of_rank[rank];
    peers->output[rank] = output.pointers.of_rank[rank];
  }
  peers->multicast_input = input.pointers.multicast;
  peers->multicast_output = output.pointers.multicast;
}

std::optional<Failure> CopyIfElsewhere(void* to, const BufferView& from, cudaStream_t stream) {
  if (to == from.data || from.nbytes == 0) return std::nullopt;
  return device::Copy(to, from.data, from.nbytes, stream);
}

}  // namespace

Stages::OfDevice Stages::Find(int device) {
  std::lock_guard<std::mutex> lock(mu_);
  return of_device_[device];
}

void Stages::Keep(int device, const OfDevice& kept) {
  std::lock_guard<std::mutex> lock(mu_);
  of_device_[device] = kept;
}

std::optional<Failure> Stages::Prepare(Collectives& xla, int device, const Buffers& buffers) {
  if (auto failure = site_.CheckBuffers(buffers)) return failure;
  if (site_.is_empty()) return std::nullopt;
  if (auto failure = xla.RequestCommunicator()) return failure;
  if (site_.op == Op::kBarrier || site_.is_by_nccl()) return std::nullopt;
  OfDevice kept = Find(device);
  const bool wants_windows =
      kept.agreement == nullptr || kept.agreement->route.path == Path::kUserBuffers;
  if (!wants_windows || !CanAsk(xla, device, buffers).missing.empty()) return std::nullopt;
  if (auto failure = xla.RequestWindows(Regions(buffers))) {
    kept.refused_windows = failure->message;
    Keep(device, kept);
  }
  return std::nullopt;
}

Stages::Windows Stages::CanAsk(Collectives& xla, int device, const Buffers& buffers) {
  const auto never = [](const std::string& why) { return Windows{{}, why, /*for_good=*/true}; };
  if (!xla.has_windows()) return never("this jaxlib offers no windows (0.12 does)");
  const auto api = nccl::Get();
  const auto* found = std::get_if<const nccl::Api*>(&api);
  if (found == nullptr || !(*found)->has_peer_pointers()) {
    return never("NCCL is too old for windows");
  }
  if (const std::string why = WhyNoWindows(device, site_); !why.empty()) return never(why);
  if (std::string refused = Find(device).refused_windows; !refused.empty()) return {{}, refused};
  if (Overlap(buffers.inputs[0], buffers.outputs[0])) {
    return {{}, "the result replaces the operand"};
  }
  // XLA takes every request, and if it then cannot register the memory the program fails: look
  // before.
  for (const Region& region : Regions(buffers)) {
    if (!device::IsShareable(region.buffer)) {
      return {{}, "XLA's allocator gives memory that cannot be shared between devices"};
    }
  }
  return {};
}

Stages::Windows Stages::FindWindows(Collectives& xla, int device, const Buffers& buffers) {
  if (site_.is_by_nccl()) return {};  // What it needs none for, it says nothing about.
  Windows windows = CanAsk(xla, device, buffers);
  if (!windows.missing.empty() || site_.op == Op::kBarrier) return windows;
  const auto find = [&](const BufferView& view, int64_t* place) {
    if (view.nbytes == 0) return;
    const auto at = xla.GetWindow(view.data);
    if (const auto* failure = std::get_if<Failure>(&at)) {
      windows.missing = failure->message;
    } else {
      *place = static_cast<int64_t>(std::get<WindowAt>(at).offset);
    }
  };
  find(buffers.inputs[0], &windows.places.input);
  find(buffers.outputs[0], &windows.places.output);
  return windows;
}

std::optional<Failure> Stages::Initialize(Collectives& xla, int device, const Buffers& buffers) {
  if (site_.is_empty()) return std::nullopt;
  const device::Scoped current(device);
  const auto got = xla.GetCommunicator();
  if (auto* failure = std::get_if<Failure>(&got)) return *failure;
  const auto clique = CliqueFor(device, std::get<nccl::Comm*>(got));
  if (auto fault = clique->Fault(/*is_caller=*/true)) return fault;
  OfDevice kept = Find(device);
  if (kept.agreement == nullptr || kept.agreement->clique != clique) {
    auto agreed = Agree(xla, device, buffers, clique, &kept.compared);
    if (auto* failure = std::get_if<Failure>(&agreed)) return *failure;
    kept.agreement = std::get<std::shared_ptr<const Agreement>>(agreed);
    kept.refused_windows.clear();
    Keep(device, kept);
  } else if (auto failure = ComparePlaces(xla, device, buffers)) {
    return failure;
  }
  const Agreement& agreement = *kept.agreement;
  if (agreement.route.path != Path::kUserBuffers || site_.op == Op::kBarrier) return std::nullopt;
  Call call = agreement.call;
  auto failure = FillWindows(xla, *clique, buffers, /*is_first=*/true, &call.peers);
  if (failure) return failure;
  const auto refusal = Refusal(call, clique->offer().device);  // Of these very addresses.
  if (!refusal) return std::nullopt;
  return site_.Error(*refusal + ".", "Use algorithm=\"xla\".");
}

Stages::AgreementOr Stages::Agree(Collectives& xla, int device, const Buffers& buffers,
                                  std::shared_ptr<Clique> clique, Places* compared) {
  Windows windows = FindWindows(xla, device, buffers);
  const std::string own = windows.missing;
  auto failure = clique->Join(site_);
  if (!failure) failure = CompareRanks(*clique, &windows);
  if (failure && failure->code == FailureCode::kDeadlineExceeded && !own.empty() &&
      site_.op != Op::kBarrier) {
    failure->message += "\n  This rank asked XLA for no windows (" + own +
                        "); ranks that did may be waiting for it there. See that all processes "
                        "have the same jaxlib, NCCL and allocator.";
  }
  if (failure) return *failure;
  if (windows.for_good) ForgoWindows(device, site_, windows.missing);
  *compared = windows.places;
  const auto route = ChooseRoute(site_, clique->offer(), windows.missing);
  if (auto* bad = std::get_if<Failure>(&route)) return *bad;
  auto agreement = std::make_shared<Agreement>();
  agreement->clique = std::move(clique);
  agreement->route = std::get<Route>(route);
  if (auto bad = AddMemory(agreement.get())) return *bad;
  return std::shared_ptr<const Agreement>(std::move(agreement));
}

std::optional<Failure> Stages::CompareRanks(Clique& clique, Windows* windows) const {
  Announcement mine = {};
  mine.fingerprint = site_.Fingerprint();
  mine.input_place = windows->places.input;
  mine.output_place = windows->places.output;
  mine.misses_windows = !windows->missing.empty();
  mine.for_good = windows->for_good;
  windows->missing.copy(mine.why_not, sizeof(mine.why_not) - 1);
  auto exchanged = clique.Exchange(mine, site_.timeout_seconds());
  if (auto* failure = std::get_if<Failure>(&exchanged)) return *failure;
  windows->missing.clear();
  windows->for_good = false;
  const auto& all = std::get<std::vector<Announcement>>(exchanged);
  for (size_t rank = 0; rank < all.size(); ++rank) {
    const Announcement& other = all[rank];
    if (other.fingerprint != mine.fingerprint) {
      return site_.Error("rank " + std::to_string(rank) + " is at another collective than rank " +
                             std::to_string(clique.rank()) + ", or has another plan for it.",
                         "All processes must run the same program, with the same shapes and the "
                         "same definitions of algorithms.");
    }
    const bool says_more = windows->missing.empty() || (other.for_good && !windows->for_good);
    if (other.misses_windows && says_more) {
      windows->missing = other.why_not;
      windows->for_good = other.for_good;
    }
  }
  for (size_t rank = 1; rank < all.size() && windows->missing.empty(); ++rank) {
    if (all[rank].input_place == all[0].input_place &&
        all[rank].output_place == all[0].output_place) {
      continue;
    }
    windows->missing =
        "rank " + std::to_string(rank) + "'s arrays lie elsewhere in XLA's windows than rank 0's";
  }
  return std::nullopt;
}

// Buffers may move between runs. Ranks whose buffers have not moved since all compared them have
// still the same places; so it takes an exchange only where they have, which is then so on all
// ranks. Where it is not, ranks that exchange meet nobody, and all fail by their deadlines.
std::optional<Failure> Stages::ComparePlaces(Collectives& xla, int device, const Buffers& buffers) {
  OfDevice kept = Find(device);
  if (kept.agreement->route.path != Path::kUserBuffers || site_.op == Op::kBarrier) {
    return std::nullopt;
  }
  Windows windows = FindWindows(xla, device, buffers);
  if (windows.missing.empty() && windows.places == kept.compared) return std::nullopt;
  const Places own = windows.places;
  if (auto failure = CompareRanks(*kept.agreement->clique, &windows)) return failure;
  if (!windows.missing.empty()) {
    return site_.Error("kernels reach the arrays no more where the ranks agreed that they would: " +
                           windows.missing + ".",
                       "What was recorded may be replayed, so that the ranks cannot change to "
                       "copies now. Use algorithm=\"xla\", or start the program anew.");
  }
  kept.compared = own;
  Keep(device, kept);
  return std::nullopt;
}

std::optional<Failure> Stages::AddMemory(Agreement* agreement) const {
  using Buffer = std::shared_ptr<const SymmetricBuffer>;
  Clique& clique = *agreement->clique;
  Call& call = agreement->call;
  call = site_.ToCall();
  if (agreement->route.path == Path::kHostCalls) {
    auto marks = clique.Watch(site_);
    if (auto* failure = std::get_if<Failure>(&marks)) return *failure;
    agreement->marks = std::get<HostWatch::Marks>(marks);
    return std::nullopt;
  }
  call.kernel = agreement->route.kernel;
  clique.FillPeers(&call.peers);
  call.num_blocks = BlocksFor(call, clique.offer().device);
  const double timeout_s = site_.timeout_seconds();
  if (const int64_t nbytes = ScratchNbytes(call); nbytes > 0) {
    auto scratch = clique.Scratch(call.kernel, nbytes, timeout_s);
    if (auto* failure = std::get_if<Failure>(&scratch)) return *failure;
    std::copy_n(std::get<Buffer>(scratch)->pointers.of_rank, call.peers.num_ranks,
                call.peers.scratch);
  }
  if (site_.plan != nullptr) {
    auto image = clique.Upload(site_.plan->images[clique.rank()], timeout_s);
    if (auto* failure = std::get_if<Failure>(&image)) return *failure;
    call.program_image = std::get<void*>(image);
  }
  return agreement->route.path == Path::kStaging ? AddStaging(agreement) : std::nullopt;
}

std::optional<Failure> Stages::AddStaging(Agreement* agreement) const {
  using Buffer = std::shared_ptr<const SymmetricBuffer>;
  Clique& clique = *agreement->clique;
  const double timeout_s = site_.timeout_seconds();
  auto input = clique.Staging(Clique::Side::kInput, site_.input_nbytes(), timeout_s);
  if (auto* failure = std::get_if<Failure>(&input)) return *failure;
  auto output = clique.Staging(Clique::Side::kOutput, site_.output_nbytes(), timeout_s);
  if (auto* failure = std::get_if<Failure>(&output)) return *failure;
  agreement->input = std::get<Buffer>(input);
  agreement->output = std::get<Buffer>(output);
  FillStaging(*agreement->input, *agreement->output, &agreement->call.peers);
  return std::nullopt;
}

std::optional<Failure> Stages::FillWindows(Collectives& xla, Clique& clique, const Buffers& buffers,
                                           bool is_first, PeerTable* peers) const {
  auto fill = [&](const BufferView& view, void** of_rank, void** multicast) {
    if (view.nbytes == 0) return std::optional<Failure>();
    const auto at = xla.GetWindow(view.data);
    if (auto* failure = std::get_if<Failure>(&at)) return std::optional<Failure>(*failure);
    auto pointers = clique.PointersOf(std::get<WindowAt>(at), is_first);
    if (auto* failure = std::get_if<Failure>(&pointers)) return std::optional<Failure>(*failure);
    const auto& read = std::get<PeerPointers>(pointers);
    std::copy_n(read.of_rank, clique.offer().num_ranks, of_rank);
    *multicast = read.multicast;
    return std::optional<Failure>();
  };
  auto failure = fill(buffers.inputs[0], peers->input, &peers->multicast_input);
  return failure ? failure : fill(buffers.outputs[0], peers->output, &peers->multicast_output);
}

std::optional<Failure> Stages::Execute(Collectives& xla, int device, const Buffers& buffers,
                                       cudaStream_t stream) {
  if (auto failure = site_.CheckBuffers(buffers)) return failure;
  if (site_.is_empty()) return std::nullopt;
  const auto agreement = Find(device).agreement;
  if (agreement == nullptr) {
    return Failure{FailureCode::kInternal, site_.Where() + ": XLA did not initialize the call."};
  }
  if (auto fault = agreement->clique->Fault(/*is_caller=*/true)) return fault;
  agreement->clique->NoteCall(site_.op_id);
  const device::Scoped current(device);
  if (site_.op == Op::kBarrier) {
    auto failure = CopyIfElsewhere(buffers.outputs[0].data, buffers.inputs[0], stream);
    if (failure) return failure;
  }
  if (agreement->route.path == Path::kHostCalls) {
    return RunHostCalls(site_, agreement->clique->communicator(), agreement->marks, buffers,
                        stream);
  }
  return Launch(xla, *agreement, buffers, stream);
}

std::optional<Failure> Stages::Launch(Collectives& xla, const Agreement& agreement,
                                      const Buffers& buffers, cudaStream_t stream) const {
  Call call = agreement.call;
  if (site_.op == Op::kRaggedAllToAll) {
    call.rows.input_offsets = buffers.inputs[2].data;
    call.rows.send_sizes = buffers.inputs[3].data;
    call.rows.output_offsets = buffers.inputs[4].data;
    call.rows.is_int64 = buffers.inputs[2].element_nbytes == 8;
  }
  const bool is_staged = agreement.route.path == Path::kStaging;
  std::optional<Failure> failure;
  if (is_staged) {
    failure = CopyIn(agreement, buffers, stream);
  } else if (site_.op != Op::kBarrier) {
    failure = FillWindows(xla, *agreement.clique, buffers, /*is_first=*/false, &call.peers);
    if (!failure && site_.op == Op::kRaggedAllToAll) {
      failure = CopyIfElsewhere(buffers.outputs[0].data, buffers.inputs[1], stream);
    }
  }
  if (!failure) failure = device::Check(Name(call.kernel), gpu::Launch(call, stream));
  if (failure) {
    failure->message = site_.Where() + ": " + failure->message;
    return failure;
  }
  if (!is_staged || buffers.outputs[0].nbytes == 0) return std::nullopt;
  return device::Copy(buffers.outputs[0].data, call.peers.output[call.peers.rank],
                      buffers.outputs[0].nbytes, stream);
}

std::optional<Failure> Stages::CopyIn(const Agreement& agreement, const Buffers& buffers,
                                      cudaStream_t stream) const {
  const PeerTable& peers = agreement.call.peers;
  auto failure = CopyIfElsewhere(peers.input[peers.rank], buffers.inputs[0], stream);
  if (failure || site_.op != Op::kRaggedAllToAll) return failure;
  // Rows that nobody sends keep what they are.
  return CopyIfElsewhere(peers.output[peers.rank], buffers.inputs[1], stream);
}

}  // namespace jcoll::gpu
