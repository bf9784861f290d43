#ifndef JCOLL_FLOAT16_H_
#define JCOLL_FLOAT16_H_

#include <cstdint>

#include "dtype.h"

// Conversion between float and the 16-bit types. Rounding is to nearest, ties to even; a NaN stays
// a NaN (quiet, with the upper bits of its payload), denormal numbers are kept whatever the
// thread's mode is, and so the bits are those of x86's F16C instructions. Choices are made with
// masks, not branches, so that loops vectorise.
//
// `static`, not merely `inline`: reduce_kernels.cc is compiled for several instruction sets, and of
// several copies with external linkage the linker would keep one, perhaps with AVX-512 in it.

namespace jcoll {

static inline uint32_t FloatBits(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  return bits;
}

static inline float BitsFloat(uint32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, sizeof x);
  return x;
}

// All ones where `condition` holds. A choice by mask keeps the compiler from moving the
// floating-point arithmetic of one side into a branch, which it could not vectorise then (the
// arithmetic might trap).
static inline uint32_t MaskIf(bool condition) { return 0u - static_cast<uint32_t>(condition); }
static inline uint32_t Choose(bool condition, uint32_t yes, uint32_t no) {
  return (MaskIf(condition) & yes) | (~MaskIf(condition) & no);
}

static inline float ToFloat(BFloat16 x) { return BitsFloat(uint32_t{x.bits} << 16); }

static inline BFloat16 ToBFloat16(float x) {
  const uint32_t bits = FloatBits(x);
  // Adding just under half of the last kept place, or half when that place is odd, carries exactly
  // when the nearest (even) value is the next one; past the largest value it carries into infinity.
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const uint32_t quiet_nan = (bits >> 16) | 0x40;
  const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
  return {static_cast<uint16_t>(Choose(is_nan, quiet_nan, rounded))};
}

// float16 is sign, 5 bits of exponent with bias 15, 10 of mantissa; float has bias 127 and 23. Both
// directions move the mantissa by 13 places and the exponent by 112.
static inline float ToFloat(Float16 x) {
  const uint32_t magnitude = x.bits & 0x7fffu;
  // 2^-14 and above. All ones in the exponent (infinity, NaN) must become all ones: another 112.
  const uint32_t special = MaskIf(magnitude >= 0x7c00) & (112u << 23);
  const uint32_t quiet = MaskIf(magnitude > 0x7c00) & (1u << 22);
  const uint32_t normal = ((magnitude << 13) + (112u << 23) + special) | quiet;
  // Below, the value is mantissa * 2^-24: an integer of 10 bits, scaled without loss.
  const uint32_t denormal =
      FloatBits(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
  const uint32_t sign = (x.bits & 0x8000u) << 16;
  return BitsFloat(sign | Choose(magnitude < 0x0400, denormal, normal));
}

static inline Float16 ToFloat16(float x) {
  const uint32_t bits = FloatBits(x);
  const uint32_t magnitude = bits & 0x7fffffff;
  // From 2^-14: round as in ToBFloat16. From 65520 this carries into infinity; from 2^16 on it
  // would overflow the exponent, and infinity is taken instead.
  const uint32_t rebased = magnitude - (112u << 23);
  const uint32_t rounded = (rebased + 0xfff + ((rebased >> 13) & 1)) >> 13;
  const uint32_t normal = Choose(magnitude >= 0x47800000, 0x7c00, rounded);
  // Below 2^-14 the unit is 2^-24, and that is the last place of 0.5f: the addition rounds, and the
  // mantissa of the sum counts the units.
  const uint32_t denormal = FloatBits(BitsFloat(magnitude) + 0.5f) - FloatBits(0.5f);
  const uint32_t finite = Choose(magnitude < 0x38800000, denormal, normal);
  const uint32_t quiet_nan = 0x7e00 | ((magnitude >> 13) & 0x3ff);
  const uint32_t result = Choose(magnitude > 0x7f800000, quiet_nan, finite);
  return {static_cast<uint16_t>((bits >> 16 & 0x8000) | result)};
}

}  // namespace jcoll

#endif  // JCOLL_FLOAT16_H_
