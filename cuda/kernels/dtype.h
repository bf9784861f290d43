// Element types as the kernels know them: those of csrc/dtypes.def under the same numbers, and the
// two 8-bit floats, which the CPU runtime moves as bytes.
#pragma once

#include <cstdint>
#include <string_view>

#include "csrc/dtype.h"

namespace jcoll::gpu {

// Sign, 4 bits of exponent with bias 7, 3 of mantissa. No infinities: all ones is the one NaN.
struct Float8E4M3FN {
  uint8_t bits;
};
// Sign, 5 bits of exponent with bias 15, 2 of mantissa; infinities and NaNs as IEEE's.
struct Float8E5M2 {
  uint8_t bits;
};

enum class DType : uint8_t {
#define JCOLL_DTYPE(enumerator, name, Storage, Accum) enumerator,
#include "csrc/dtypes.def"
#undef JCOLL_DTYPE
  kF8E4M3FN,
  kF8E5M2,
};
constexpr int kNumDTypes = jcoll::kNumDTypes + 2;

// numpy's or ml_dtypes' name.
inline const char* Name(DType dtype) {
  if (dtype == DType::kF8E4M3FN) return "float8_e4m3fn";
  if (dtype == DType::kF8E5M2) return "float8_e5m2";
  return jcoll::Name(static_cast<jcoll::DType>(dtype));
}

// Bytes of one element.
inline int64_t Size(DType dtype) {
  if (dtype >= DType::kF8E4M3FN) return 1;
  return jcoll::Size(static_cast<jcoll::DType>(dtype));
}

// The inverse of Name. Returns false, and leaves *dtype alone, when no type has that name.
inline bool ParseDType(std::string_view name, DType* dtype) {
  for (int i = 0; i < kNumDTypes; ++i) {
    if (name != Name(static_cast<DType>(i))) continue;
    *dtype = static_cast<DType>(i);
    return true;
  }
  return false;
}

}  // namespace jcoll::gpu
