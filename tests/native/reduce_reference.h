#ifndef JCOLL_TESTS_NATIVE_REDUCE_REFERENCE_H_
#define JCOLL_TESTS_NATIVE_REDUCE_REFERENCE_H_

// What Reduce has to compute, one element at a time and with none of the library's conversions or
// tricks.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <vector>

#include "csrc/reduce.h"

namespace jcoll {

// The value of a 16-bit float with this many mantissa bits and this exponent bias.
inline float Decode(uint16_t bits, int mantissa_bits, int bias) {
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  const int exponent = (bits & 0x7fff) >> mantissa_bits;
  double magnitude;
  if (exponent == 2 * bias + 1) {
    magnitude = mantissa == 0 ? std::numeric_limits<double>::infinity() : std::nan("");
  } else if (exponent == 0) {
    magnitude = std::ldexp(mantissa, 1 - bias - mantissa_bits);
  } else {
    magnitude = std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
  }
  return static_cast<float>(bits & 0x8000 ? -magnitude : magnitude);
}

// Rounds to a multiple of the unit in the last place, with the machine's own rounding of ties to
// even.
inline uint16_t Encode(float x, int mantissa_bits, int bias) {
  const int infinity = (2 * bias + 1) << mantissa_bits;
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  if (std::isnan(x)) return static_cast<uint16_t>(sign | infinity | 1 << (mantissa_bits - 1));
  if (std::isinf(x)) return static_cast<uint16_t>(sign | infinity);
  const double magnitude = std::fabs(static_cast<double>(x));
  const int exponent = std::max(magnitude == 0 ? -bias : std::ilogb(magnitude), 1 - bias);
  const int units =
      static_cast<int>(std::nearbyint(std::ldexp(magnitude, mantissa_bits - exponent)));
  // `units` has the implicit bit (for a normal value), which adds one to the exponent field.
  const int bits = ((exponent + bias - 1) << mantissa_bits) + units;
  return static_cast<uint16_t>(sign | std::min(bits, infinity));
}

inline float Decode(Float16 x) { return Decode(x.bits, 10, 15); }
inline float Decode(BFloat16 x) { return Decode(x.bits, 7, 127); }
inline bool Decode(Bool x) { return x.bits != 0; }
template <typename T>
T Decode(T x) {
  return x;
}

inline void Encode(float x, Float16* out) { out->bits = Encode(x, 10, 15); }
inline void Encode(float x, BFloat16* out) { out->bits = Encode(x, 7, 127); }
inline void Encode(bool x, Bool* out) { out->bits = x; }
template <typename T>
void Encode(T x, T* out) {
  *out = x;
}

inline bool IsNan(Float16 x) { return std::isnan(Decode(x)); }
inline bool IsNan(BFloat16 x) { return std::isnan(Decode(x)); }
inline bool IsNan(float x) { return std::isnan(x); }
inline bool IsNan(double x) { return std::isnan(x); }
template <typename T>
bool IsNan(T) {
  return false;
}

template <typename T>
T Larger(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    if (std::isnan(a) || std::isnan(b)) return std::numeric_limits<T>::quiet_NaN();
    if (a == b) return std::signbit(a) ? b : a;
  }
  return a < b ? b : a;
}
template <typename T>
T Smaller(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    if (std::isnan(a) || std::isnan(b)) return std::numeric_limits<T>::quiet_NaN();
    if (a == b) return std::signbit(a) ? a : b;
  }
  return b < a ? b : a;
}

// In 64 bits without sign, whose low bits are those of every narrower sum and product.
template <typename T>
T Wrapped(ReduceOp op, T a, T b) {
  const uint64_t x = static_cast<uint64_t>(a), y = static_cast<uint64_t>(b);
  return static_cast<T>(op == ReduceOp::kProd ? x * y : x + y);
}

template <typename T>
T Combine(ReduceOp op, T a, T b) {
  if (op == ReduceOp::kMin) return Smaller(a, b);
  if (op == ReduceOp::kMax) return Larger(a, b);
  if constexpr (std::is_integral_v<T>) {
    if (op == ReduceOp::kAnd) return static_cast<T>(a & b);
    if (op == ReduceOp::kOr) return static_cast<T>(a | b);
    return Wrapped(op, a, b);
  } else {
    return op == ReduceOp::kProd ? a * b : a + b;
  }
}
template <typename C>
C CombineComplex(ReduceOp op, C a, C b) {
  if (op != ReduceOp::kProd) return {a.re + b.re, a.im + b.im};
  return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
}
inline Complex64 Combine(ReduceOp op, Complex64 a, Complex64 b) { return CombineComplex(op, a, b); }
inline Complex128 Combine(ReduceOp op, Complex128 a, Complex128 b) {
  return CombineComplex(op, a, b);
}

template <typename T>
T Divided(T a, int n) {
  return static_cast<T>(a / n);
}
inline Complex64 Divided(Complex64 a, int n) { return {a.re / n, a.im / n}; }
inline Complex128 Divided(Complex128 a, int n) { return {a.re / n, a.im / n}; }

template <typename S>
S Reference(ReduceOp op, const std::vector<std::vector<S>>& srcs, int num_srcs, int64_t i) {
  auto acc = Decode(srcs[0][i]);
  for (int k = 1; k < num_srcs; ++k) acc = Combine(op, acc, Decode(srcs[k][i]));
  if (op == ReduceOp::kMean) acc = Divided(acc, num_srcs);
  S result;
  Encode(acc, &result);
  return result;
}

inline bool Promised(DType dtype, ReduceOp op) {
  const bool is_bool = dtype == DType::kBool;
  const bool is_complex = dtype == DType::kC64 || dtype == DType::kC128;
  const bool is_float =
      dtype == DType::kF16 || dtype == DType::kBF16 || dtype == DType::kF32 || dtype == DType::kF64;
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kProd:
      return !is_bool;
    case ReduceOp::kMean:
      return is_float || is_complex;
    case ReduceOp::kMin:
    case ReduceOp::kMax:
      return !is_complex;
    default:
      return !is_float && !is_complex;
  }
}

}  // namespace jcoll

#endif  // JCOLL_TESTS_NATIVE_REDUCE_REFERENCE_H_
