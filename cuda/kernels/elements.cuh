// The arithmetic of reductions, element by element: what types accumulate in, how they are widened
// and rounded, and the operations. Device and emulator come to the same bits (but for the sign and
// payload of NaNs).
//
// f16, bf16 and the 8-bit floats accumulate in float and are rounded once, to nearest, ties to
// even. What is too large for float8_e4m3fn, which has no infinity, becomes NaN. Integers
// wrap, in 32 bits or more, of which the lowest are kept.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/kernels/dtype.h"
#include "cuda/kernels/vector.cuh"

#ifdef JCOLL_EMULATOR
#include "csrc/float16.h"
#endif

namespace jcoll::gpu {

// ---- The 8-bit floats, which no instruction of sm_80 knows.
//
// A format of kMantissa bits with bias kBias; float has 23 and 127.
template <int kMantissa, int kBias>
struct SmallFloat {
  static constexpr int kShift = 23 - kMantissa;
  static constexpr uint32_t kRebase = uint32_t{127 - kBias} << 23;
  static constexpr uint32_t kSmallestNormal = uint32_t{127 + 1 - kBias} << 23;  // As a float.

  // Of a finite magnitude.
  __device__ static float Widen(uint32_t magnitude) {
    if (magnitude >> kMantissa != 0) return BitCast<float>((magnitude << kShift) + kRebase);
    constexpr uint32_t kUnit = uint32_t{127 + 1 - kBias - kMantissa} << 23;  // As a float.
    return static_cast<float>(magnitude) * BitCast<float>(kUnit);
  }

  // The magnitude of a finite float, rounded; beyond the format's largest exponent it is too large
  // for the format, or for 7 bits, in the same order.
  __device__ static uint32_t Narrow(float x) {
    const uint32_t bits = BitCast<uint32_t>(x) & 0x7fffffffu;
    if (bits < kSmallestNormal) {
      // The unit of what is not normal is the last place of this float: the addition rounds.
      constexpr uint32_t kRounder = uint32_t{127 + 1 - kBias - kMantissa + 23} << 23;
      return BitCast<uint32_t>(BitCast<float>(bits) + BitCast<float>(kRounder)) - kRounder;
    }
    // Half of the last place, or just less when that is even, carries when it must.
    const uint32_t half = (1u << (kShift - 1)) - 1 + ((bits >> kShift) & 1);
    return (bits - kRebase + half) >> kShift;
  }
};
using E4M3 = SmallFloat<3, 7>;
using E5M2 = SmallFloat<2, 15>;

// ---- Between an element in memory and its accumulator.

template <typename T>
__device__ __forceinline__ T Widen(T x) {
  return x;
}
__device__ __forceinline__ uint32_t Widen(uint8_t x) { return x; }
__device__ __forceinline__ uint32_t Widen(uint16_t x) { return x; }
__device__ __forceinline__ int32_t Widen(int8_t x) { return x; }
__device__ __forceinline__ int32_t Widen(int16_t x) { return x; }
__device__ inline float Widen(Float8E4M3FN x) {
  const uint32_t magnitude = x.bits & 0x7fu, sign = (x.bits & 0x80u) << 24;
  const uint32_t bits = magnitude == 0x7f ? 0x7fc00000u : BitCast<uint32_t>(E4M3::Widen(magnitude));
  return BitCast<float>(bits | sign);
}
__device__ inline float Widen(Float8E5M2 x) {
  const uint32_t magnitude = x.bits & 0x7fu, sign = (x.bits & 0x80u) << 24;
  const uint32_t bits = magnitude >= 0x7c ? 0x7f800000u | (magnitude & 3) << 21
                                          : BitCast<uint32_t>(E5M2::Widen(magnitude));
  return BitCast<float>(bits | sign);
}

template <typename A, typename T>
__device__ __forceinline__ void Narrow(A x, T* out) {
  *out = static_cast<T>(x);
}
__device__ inline void Narrow(float x, Float8E4M3FN* out) {
  constexpr uint32_t kNan = 0x7f;
  const uint32_t sign = BitCast<uint32_t>(x) >> 24 & 0x80u;
  const uint32_t magnitude = x - x == 0 ? E4M3::Narrow(x) : kNan;
  out->bits = static_cast<uint8_t>(sign | (magnitude < kNan ? magnitude : kNan));
}
__device__ inline void Narrow(float x, Float8E5M2* out) {
  constexpr uint32_t kInfinity = 0x7c, kNan = 0x7e;
  const uint32_t sign = BitCast<uint32_t>(x) >> 24 & 0x80u;
  uint32_t magnitude = x != x ? kNan : kInfinity;
  if (x - x == 0) magnitude = E5M2::Narrow(x);
  if (x == x && magnitude > kInfinity) magnitude = kInfinity;
  out->bits = static_cast<uint8_t>(sign | magnitude);
}

#ifdef JCOLL_EMULATOR
inline float Widen(Float16 x) { return ToFloat(x); }
inline float Widen(BFloat16 x) { return ToFloat(x); }
inline void Narrow(float x, Float16* out) { *out = ToFloat16(x); }
inline void Narrow(float x, BFloat16* out) { *out = ToBFloat16(x); }
#else
__device__ __forceinline__ float Widen(Float16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}
__device__ __forceinline__ float Widen(BFloat16 x) {
  return BitCast<float>(uint32_t{x.bits} << 16);
}
__device__ __forceinline__ void Narrow(float x, Float16* out) {
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out->bits) : "f"(x));
}
__device__ __forceinline__ void Narrow(float x, BFloat16* out) {
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out->bits) : "f"(x));
}
#endif

// ---- Operations on accumulators.

struct Sum {
  template <typename A>
  __device__ __forceinline__ static A Combine(A a, A b) {
    return a + b;
  }
};

struct Prod {
  template <typename A>
  __device__ __forceinline__ static A Combine(A a, A b) {
    return a * b;
  }
};

// NaN in any operand gives NaN, and -0 < +0: among equal numbers only the zeros differ in bits.
template <bool kMin>
struct Extreme {
  template <typename A>
  __device__ __forceinline__ static A Combine(A a, A b) {
#ifndef JCOLL_EMULATOR
    if constexpr (std::is_same_v<A, float>) {  // The instructions order the zeros as well.
      float c;
      if constexpr (kMin) {
        asm("min.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
      } else {
        asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
      }
      return c;
    }
#endif
    if constexpr (std::is_floating_point_v<A>) {
      using Bits = std::conditional_t<sizeof(A) == 4, uint32_t, uint64_t>;
      if (a != a) return a;
      if (b != b) return b;
      const Bits x = BitCast<Bits>(a), y = BitCast<Bits>(b);
      if (a == b) return BitCast<A>(kMin ? x | y : x & y);
    }
    return (kMin ? b < a : a < b) ? b : a;
  }
};
using Min = Extreme<true>;
using Max = Extreme<false>;

// What has been accumulated, as it is rounded: a mean is a sum divided by the number of summands.
template <typename Op, typename A>
__device__ __forceinline__ A Finish(A acc, int32_t divisor) {
  if constexpr (std::is_same_v<Op, Sum> && std::is_floating_point_v<A>) {
    if (divisor != 1) return acc / static_cast<A>(divisor);
  }
  return acc;
}

}  // namespace jcoll::gpu
