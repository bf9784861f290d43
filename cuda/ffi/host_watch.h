// Deadlines for NCCL's own collectives, which have none. They can be watched and not ended: the
// communicator is XLA's, and NCCL frees one that is aborted.
//
// What runs on a stream is seen from the host by a word in its memory, which copies on the same
// stream set before a collective and clear after it. Copies may be recorded into a CUDA graph.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <utility>
#include <variant>
#include <vector>

#include "csrc/failure.h"
#include "cuda/ffi/device.h"

namespace jcoll::gpu {

// Of one device and communicator, whose collectives run one after the other.
class HostWatch {
 public:
  // What puts the marks of one call site on a stream.
  struct Marks {
    uint32_t* word = nullptr;                          // As the device sees it.
    const uint32_t *begun = nullptr, *done = nullptr;  // In device memory: what is copied to it.
  };

  // `on_late`(op_id, timeout_s) is called from another thread, once, when a collective has run for
  // too long. The watch must live as long as the process.
  explicit HostWatch(std::function<void(uint32_t, double)> on_late)
      : on_late_(std::move(on_late)) {}

  // The device is current. `upload` copies words to device memory that stays.
  using Upload = std::function<std::variant<void*, Failure>(const std::vector<int32_t>&)>;
  std::variant<Marks, Failure> Register(uint32_t op_id, double timeout_s, const Upload& upload);

  // Looks, as its thread does now and then. `now_s`: of any clock that goes forward.
  void Look(double now_s);

 private:
  static constexpr uint32_t kIdle = 0, kSeen = 1, kFirstOp = 2;

  std::optional<Failure> Allocate();

  const std::function<void(uint32_t, double)> on_late_;
  std::mutex mu_;
  uint32_t* word_ = nullptr;  // On the host: kIdle, kFirstOp + op_id, or kSeen.
  uint32_t* word_on_device_ = nullptr;
  std::map<uint32_t, double> timeout_of_;  // By op_id.
  uint32_t seen_op_ = 0;
  double seen_at_s_ = 0;
  bool was_late_ = false;
};

// Has a thread of this process look at it from now on.
void StartLooking(HostWatch* watch);

}  // namespace jcoll::gpu
