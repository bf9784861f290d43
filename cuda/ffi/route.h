// How a call is done: by which kernel, on which memory, or by NCCL. A pure function of what is the
// same on all ranks, so that all of them choose alike.
#pragma once

#include <string>
#include <variant>

#include "cuda/ffi/call_site.h"
#include "cuda/kernels/launch.h"

namespace jcoll::gpu {

// What a clique's ranks have in common.
struct Offer {
  int num_ranks = 1;
  DeviceFacts device;      // The least of all ranks' devices.
  std::string no_kernels;  // Why our kernels cannot run on this clique; empty: they can.
  bool multicast = false;  // All ranks have multicast addresses (NVLS).
};

enum class Path {
  kUserBuffers,  // A kernel on XLA's buffers, through XLA's windows.
  kStaging,      // A kernel on jcoll's own window; the arrays are copied in and out.
  kHostCalls,    // NCCL's collectives.
};

struct Route {
  Path path = Path::kHostCalls;
  Kernel kernel = Kernel::kBarrier;  // If not kHostCalls.
};

// `no_windows`: why the call's buffers are in no window of XLA's on some rank; empty: they are on
// all. An algorithm that was asked for by name is taken or fails; "direct" takes what there is.
std::variant<Route, Failure> ChooseRoute(const CallSite& site, const Offer& offer,
                                         const std::string& no_windows);

}  // namespace jcoll::gpu
