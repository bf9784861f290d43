// What the custom calls of both runtimes, the CPU's and CUDA's, share of XLA's FFI: attributes,
// read by name, and the codes of failures.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "csrc/failure.h"
#include "xla/ffi/api/ffi.h"

namespace jcoll {

inline XLA_FFI_Error_Code ToErrorCode(FailureCode code) {
  switch (code) {
    case FailureCode::kInvalidArgument:
      return XLA_FFI_Error_Code_INVALID_ARGUMENT;
    case FailureCode::kDeadlineExceeded:
      return XLA_FFI_Error_Code_DEADLINE_EXCEEDED;
    case FailureCode::kInternal:
      break;
  }
  return XLA_FFI_Error_Code_INTERNAL;
}

// Reads attributes and remembers the first that is missing or of another type.
class Attributes {
 public:
  explicit Attributes(xla::ffi::Dictionary attrs) : attrs_(attrs) {}

  void Read(std::string_view name, std::string* out) {
    std::string_view view;
    Get<std::string_view>(name, &view);
    *out = std::string(view);
  }
  void Read(std::string_view name, double* out) { Get<double>(name, out); }
  void Read(std::string_view name, int64_t* out) { Get<int64_t>(name, out); }
  void Read(std::string_view name, int* out) {
    int64_t wide = 0;
    Get<int64_t>(name, &wide);
    *out = static_cast<int>(wide);
    if (*out != wide) MarkBad(name);
  }
  void Read(std::string_view name, bool* out) {
    int64_t wide = 0;
    Get<int64_t>(name, &wide);
    *out = wide != 0;
  }
  // Absent means empty: MLIR has no array attribute without elements.
  void Read(std::string_view name, std::vector<int64_t>* out) {
    if (!attrs_.contains(name)) return;
    xla::ffi::Span<const int64_t> span;
    Get<xla::ffi::Span<const int64_t>>(name, &span);
    out->assign(span.begin(), span.end());
  }

  bool Has(std::string_view name) const { return attrs_.contains(name); }
  const std::string& bad() const { return bad_; }
  void MarkBad(std::string_view name) {
    if (bad_.empty()) bad_ = std::string(name);
  }

 private:
  template <typename T, typename Out>
  void Get(std::string_view name, Out* out) {
    xla::ffi::ErrorOr<T> value = attrs_.get<T>(name);
    if (value.has_value()) {
      *out = *value;
    } else {
      MarkBad(name);
    }
  }
  xla::ffi::Dictionary attrs_;
  std::string bad_;
};

}  // namespace jcoll
