#include "cuda/ffi/error_text.h"

#include <cstdio>

#include "cuda/ffi/call_site.h"

namespace jcoll::gpu {
namespace {

std::string Seconds(uint64_t nanoseconds) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.3g s", static_cast<double>(nanoseconds) * 1e-9);
  return text;
}

std::string WhatHappened(const ErrorRecord& record) {
  const std::string rank = "rank " + std::to_string(record.rank);
  const std::string peer = "rank " + std::to_string(record.peer);
  switch (record.kind) {
    case ErrorKind::kPeerGaveUp:
      return rank + " was told that the call had failed, because of " + peer + ".";
    case ErrorKind::kRowsOutside:
      return "what " + rank + " sends to " + peer + " ends at row " + std::to_string(record.seen) +
             " or begins before row 0, and there are " + std::to_string(record.expected) + " rows.";
    case ErrorKind::kLaunchesOverlap:
      return "two calls of " + rank +
             " on one communicator ran at the same time, and use the same counters.";
    case ErrorKind::kNone:
    case ErrorKind::kTimeout:
      break;
  }
  return rank + " waited " + Seconds(record.waited_ns) + " for " + peer + " and gave up (saw " +
         std::to_string(record.seen) + ", needed " + std::to_string(record.expected) + ").";
}

std::string WhatToDo(const ErrorRecord& record) {
  if (record.kind == ErrorKind::kRowsOutside) return "Correct the offsets and sizes.";
  if (record.kind == ErrorKind::kLaunchesOverlap) {
    return "Keep the collectives of a communicator in one order: no compute_on with a stream of "
           "its "
           "own, and no concurrent branches in a command buffer "
           "(XLA_FLAGS=--xla_gpu_enable_command_buffer=).";
  }
  return "Look what rank " + std::to_string(record.peer) +
         " did instead (its log, jcoll.check_health() there); raise timeout_s if it is only slow.";
}

}  // namespace

Failure ErrorOf(const ErrorRecord& record, int device) {
  const bool is_misuse = record.kind == ErrorKind::kRowsOutside;
  return {is_misuse ? FailureCode::kInvalidArgument : FailureCode::kDeadlineExceeded,
          WhereOf(record.op_id) + ": " + WhatHappened(record) + "\n  Device " +
              std::to_string(device) + ", call " + std::to_string(record.call) +
              " of this communicator, block " + std::to_string(record.block) +
              ". The outputs of that call hold NaN, or the largest value of their type, and the "
              "communicator takes no more calls.\n  " +
              WhatToDo(record) + " Then start the program anew."};
}

std::string LateText(uint32_t op_id, int rank, int device, double timeout_s) {
  char seconds[32];
  std::snprintf(seconds, sizeof(seconds), "%g", timeout_s);
  return WhereOf(op_id) + ": NCCL's collective was not over after " + seconds + " s, on rank " +
         std::to_string(rank) + ".\n  Device " + std::to_string(device) +
         ". NCCL waits on, and so does whoever waits for the result; the communicator takes no "
         "more calls.\n  Look at the other ranks' logs; raise timeout_s if one is only slow. End "
         "all processes of the job.";
}

}  // namespace jcoll::gpu
