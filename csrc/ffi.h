// The FFI targets that this library offers to XLA. Python registers what is listed here.
#pragma once

#include <string>
#include <vector>

namespace jcoll {

// Stage functions have the type XLA_FFI_Error*(XLA_FFI_CallFrame*).
struct FfiTarget {
  std::string name;
  void* instantiate;
  void* execute;
};

std::vector<FfiTarget> FfiTargets();

}  // namespace jcoll
