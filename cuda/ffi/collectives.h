// What XLA offers the handler of one call: communicators and windows, through its FFI extension
// "Collectives". The stages see this interface; handler.cc implements it with the extension.
#pragma once

#include <cstddef>
#include <optional>
#include <variant>
#include <vector>

#include "csrc/failure.h"
#include "cuda/ffi/nccl.h"

namespace jcoll::gpu {

struct Region {
  const void* buffer = nullptr;
  size_t nbytes = 0;
};

// Where a buffer lies in a window.
struct WindowAt {
  nccl::Window* window = nullptr;
  size_t offset = 0;
};

// For one call, and so for its groups and its communication_id.
class Collectives {
 public:
  virtual ~Collectives() = default;

  // In Prepare: XLA makes what was asked for before the next stage. Every rank must ask for the
  // same in the same order.
  virtual std::optional<Failure> RequestCommunicator() = 0;
  virtual std::optional<Failure> RequestWindows(const std::vector<Region>& regions) = 0;

  // In Initialize and Execute. XLA keeps what they return.
  virtual std::variant<nccl::Comm*, Failure> GetCommunicator() = 0;
  virtual std::variant<WindowAt, Failure> GetWindow(const void* buffer) = 0;

  virtual bool has_windows() const = 0;
};

}  // namespace jcoll::gpu
