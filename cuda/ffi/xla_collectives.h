// Collectives by XLA's FFI extension of that name.
#pragma once

#include <cstdint>
#include <optional>
#include <variant>
#include <vector>

#include "cuda/ffi/collectives.h"
#include "xla/ffi/api/ffi.h"
// In this order: the headers of XLA's extensions need those of the FFI.
#include "xla/ffi/api/collectives_c_api.h"

namespace jcoll::gpu {

// The tag by which XLA's FFI finds the extension, as in ffi::Extension<CollectivesExtension>. XLA
// has one too, but it asks for its own version of the extension and for no other.
struct CollectivesExtension {
  using CExtension = XLA_FFI_Collectives_Extension;
  using Type = const XLA_FFI_Collectives_Extension*;

  static constexpr auto kName = "Collectives";
  static constexpr int64_t kExtensionType = XLA_FFI_Extension_Collectives;
  static constexpr int32_t kMajorVersion = 0;
  static constexpr int32_t kMinorVersion = 1;

  // Minor versions only add.
  static bool Support(int32_t major, int32_t minor) {
    return major == kMajorVersion && minor >= kMinorVersion;
  }
  static Type Create(const XLA_FFI_Api*, const CExtension* extension) { return extension; }
};

class XlaCollectives : public Collectives {
 public:
  // `groups` (flat) must outlive this object.
  XlaCollectives(const XLA_FFI_Api* api, const XLA_FFI_Collectives_Extension* extension,
                 const std::vector<int64_t>& groups, int64_t group_size, int64_t communication_id);

  bool has_windows() const override;
  std::optional<Failure> RequestCommunicator() override;
  std::optional<Failure> RequestWindows(const std::vector<Region>& regions) override;
  std::variant<nccl::Comm*, Failure> GetCommunicator() override;
  std::variant<WindowAt, Failure> GetWindow(const void* buffer) override;

 private:
  template <typename Args>
  Args MakeArgs(size_t struct_size) const;
  std::optional<Failure> Take(XLA_FFI_Error* error) const;

  const XLA_FFI_Api* api_;
  const XLA_FFI_Collectives_Extension* extension_;
  std::vector<XLA_FFI_ReplicaGroup> groups_;
  int64_t communication_id_;
};

}  // namespace jcoll::gpu
