#include "cuda/ffi/route.h"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <limits>
#include <optional>
#include <vector>

#include "cuda/ffi/host_calls.h"
#include "cuda/ffi/log_once.h"

namespace jcoll::gpu {
namespace {

constexpr int64_t kKiB = 1 << 10;
constexpr int64_t kAny = std::numeric_limits<int64_t>::max();

// Up to so many ranks and bytes of the array: the first row that fits. Not measured by us: between
// what vLLM's and MSCCL++'s sources use on H100 (one-shot below 512 KB for 4 ranks, 256 KB for 8;
// lines of data and flag below 16 to 32 KB), which differ among each other by a factor of four.
struct SizeRow {
  int max_ranks;
  int64_t max_nbytes;
  Kernel kernel;
};
constexpr SizeRow kAllReduceBySize[] = {
    {2, 32 * kKiB, Kernel::kAllReduceOneShotLL},
    {2, kAny, Kernel::kAllReduceOneShot},
    {4, 32 * kKiB, Kernel::kAllReduceOneShotLL},
    {4, 512 * kKiB, Kernel::kAllReduceOneShot},
    {8, 16 * kKiB, Kernel::kAllReduceOneShotLL},
    {8, 256 * kKiB, Kernel::kAllReduceOneShot},
    {kMaxRanks, 8 * kKiB, Kernel::kAllReduceOneShotLL},
    {kMaxRanks, 64 * kKiB, Kernel::kAllReduceOneShot},
    {kMaxRanks, kAny, Kernel::kAllReduceTwoShot},
};
// Above, the switch's own reduction takes over where there is one: half of two-shot's bytes.
constexpr int64_t kMultimemFromNbytes = 256 * kKiB;
// Up to here one multimem phase, in which every rank reads the whole sum, takes less than two.
constexpr int64_t kMultimemOneShotNbytes = 64 * kKiB;
// Above, two copies and a second array's memory cost more than NCCL does.
constexpr int64_t kMaxStagingNbytes = 256 * kKiB * kKiB;

std::vector<Kernel> AllReduceKernels(const CallSite& site, const Offer& offer) {
  const int64_t nbytes = site.input_nbytes();
  if (site.algorithm == "one_shot") {
    return {Kernel::kAllReduceOneShotLL, Kernel::kAllReduceOneShot};
  }
  if (site.algorithm == "two_shot") return {Kernel::kAllReduceTwoShot};
  if (site.algorithm == "multimem") {
    if (nbytes <= kMultimemOneShotNbytes) return {Kernel::kAllReduceMultimemOneShot};
    return {Kernel::kAllReduceMultimemTwoShot};
  }
  std::vector<Kernel> kernels;
  if (offer.multicast && nbytes > kMultimemFromNbytes) {
    kernels.push_back(Kernel::kAllReduceMultimemTwoShot);
  }
  for (const SizeRow& row : kAllReduceBySize) {
    if (offer.num_ranks <= row.max_ranks && nbytes <= row.max_nbytes) {
      kernels.push_back(row.kernel);
      break;
    }
  }
  if (kernels.back() != Kernel::kAllReduceTwoShot) {
    kernels.push_back(Kernel::kAllReduceTwoShot);  // Where the first choice refuses the call.
  }
  return kernels;
}

bool IsMultimem(Kernel kernel) {
  return kernel == Kernel::kAllReduceMultimemOneShot || kernel == Kernel::kAllReduceMultimemTwoShot;
}

std::optional<Kernel> OnlyKernel(Op op) {
  switch (op) {
    case Op::kReduceScatter:
      return Kernel::kReduceScatter;
    case Op::kAllGather:
      return Kernel::kAllGather;
    case Op::kAllToAll:
      return Kernel::kAllToAll;
    case Op::kRaggedAllToAll:
      return Kernel::kRaggedAllToAll;
    case Op::kBroadcast:
      return Kernel::kBroadcast;
    case Op::kBarrier:
      return Kernel::kBarrier;
    case Op::kAllReduce:
    case Op::kReduce:
    case Op::kGather:
    case Op::kScatter:
      break;
  }
  return std::nullopt;
}

// What algorithms of kernels an op has; jcoll/algorithms/kernels.py has the same table.
struct AlgorithmRow {
  const char *op, *algorithm;
};
constexpr AlgorithmRow kAlgorithms[] = {
    {"all_reduce", "direct"},   {"all_reduce", "one_shot"},      {"all_reduce", "two_shot"},
    {"all_reduce", "multimem"}, {"reduce_scatter", "direct"},    {"reduce_scatter", "one_shot"},
    {"all_gather", "direct"},   {"all_gather", "one_shot"},      {"all_to_all", "direct"},
    {"all_to_all", "one_shot"}, {"ragged_all_to_all", "direct"}, {"ragged_all_to_all", "one_shot"},
    {"broadcast", "direct"},    {"broadcast", "one_shot"},       {"barrier", "direct"},
};

bool HasKernels(const CallSite& site) {
  return std::any_of(std::begin(kAlgorithms), std::end(kAlgorithms), [&](const AlgorithmRow& row) {
    return site.op_name == row.op && site.algorithm == row.algorithm;
  });
}

// The kernels by which an algorithm does an op, the best first; none: it does not.
std::vector<Kernel> KernelsOf(const CallSite& site, const Offer& offer) {
  if (!site.plan_op.empty()) {
    if (site.op == Op::kRaggedAllToAll) return {};  // Plans move blocks of one size.
    return {Kernel::kPlanLL, Kernel::kPlanSimple};
  }
  if (!HasKernels(site)) return {};
  if (site.op == Op::kAllReduce) return AllReduceKernels(site, offer);
  if (const auto kernel = OnlyKernel(site.op)) return {*kernel};
  return {};
}

// One of the algorithm's kernels that serves the call; or why none does.
std::variant<Kernel, std::string> ChooseKernel(const CallSite& site, const Offer& offer) {
  if (!offer.no_kernels.empty()) return offer.no_kernels;
  const std::vector<Kernel> kernels = KernelsOf(site, offer);
  if (kernels.empty()) return "there is no such algorithm for " + site.op_name;
  Call call = site.ToCall();
  call.peers.num_ranks = offer.num_ranks;
  std::string reasons;
  for (const Kernel kernel : kernels) {
    call.kernel = kernel;
    auto refusal = Refusal(call, offer.device);
    if (!refusal && IsMultimem(kernel) && !offer.multicast) {
      refusal = "the devices of the group have no multicast addresses (NVLS)";
    }
    if (!refusal) return kernel;
    reasons += (reasons.empty() ? "" : "; ") + *refusal;
  }
  return reasons;
}

// A kernel may read peers' inputs while it writes outputs.
bool NeedsStaging(const CallSite& site, const std::string& no_windows) {
  return site.op != Op::kBarrier && !no_windows.empty();
}

std::variant<Route, Failure> ByNccl(const CallSite& site) {
  if (const auto refusal = HostCallsRefusal(site)) {
    return site.Error("algorithm 'nccl' cannot serve this call: " + *refusal + ".",
                      "Use algorithm=\"xla\".");
  }
  if (const std::string caveat = HostCallsCaveat(site); !caveat.empty()) {
    LogOnce("jcoll." + site.op_name + " is done by NCCL. Mind that " + caveat);
  }
  return Route{Path::kHostCalls};
}

}  // namespace

std::variant<Route, Failure> ChooseRoute(const CallSite& site, const Offer& offer,
                                         const std::string& no_windows) {
  if (site.is_by_nccl()) return ByNccl(site);
  const auto kernel = ChooseKernel(site, offer);
  std::string reason;
  if (const auto* why = std::get_if<std::string>(&kernel)) {
    reason = *why;
  } else if (!NeedsStaging(site, no_windows)) {
    return Route{Path::kUserBuffers, std::get<Kernel>(kernel)};
  } else if (std::max(site.input_nbytes(), site.output_nbytes()) <= kMaxStagingNbytes) {
    LogOnce("CUDA kernels work on copies of the arrays: " + no_windows);
    return Route{Path::kStaging, std::get<Kernel>(kernel)};
  } else {
    reason =
        "arrays of more than 256 MiB are not copied to where kernels reach them, and " + no_windows;
  }
  if (site.algorithm != "direct") {
    return site.Error(
        "algorithm '" + site.algorithm + "' cannot serve this call on CUDA: " + reason + ".",
        "Use algorithm=\"direct\" for what this machine can do, or \"xla\".");
  }
  if (const auto refusal = HostCallsRefusal(site)) {
    return site.Error(
        "no kernel of jcoll's serves this call (" + reason + "), and " + *refusal + ".",
        "Use algorithm=\"xla\".");
  }
  const std::string caveat = HostCallsCaveat(site);
  LogOnce("jcoll." + site.op_name + " is done by NCCL: " + reason +
          (caveat.empty() ? "" : ". Mind that " + caveat));
  return Route{Path::kHostCalls};
}

}  // namespace jcoll::gpu
