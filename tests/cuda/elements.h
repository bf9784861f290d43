// Elements for tests: the dtypes as C++ types, random values of them, what a reduction of them has
// to be, and when two of them are the same result.
#pragma once

#include <array>
#include <cmath>
#include <random>
#include <vector>

#include "cuda/kernels/dtype.h"
#include "tests/cuda/world.h"
#include "tests/native/reduce_reference.h"

namespace jcoll::gpu {

// The value of an 8-bit float by its definition: no bits are moved here.
inline float Decode(int bits, int mantissa_bits, int bias, bool has_infinity) {
  const int exponents = 1 << (7 - mantissa_bits);
  const int mantissa = bits % (1 << mantissa_bits),
            exponent = bits / (1 << mantissa_bits) % exponents;
  const float sign = bits >= 128 ? -1 : 1;
  if (has_infinity && exponent == exponents - 1) {
    return mantissa == 0 ? sign * INFINITY : NAN;
  }
  if (!has_infinity && bits % 128 == 127) return NAN;
  const float fraction = std::ldexp(static_cast<float>(mantissa), -mantissa_bits);
  return sign * (exponent == 0 ? std::ldexp(fraction, 1 - bias)
                               : std::ldexp(1 + fraction, exponent - bias));
}
inline float Decode(Float8E4M3FN x) { return Decode(x.bits, 3, 7, false); }
inline float Decode(Float8E5M2 x) { return Decode(x.bits, 2, 15, true); }

// The nearest of all values of the type; of two equally near ones the even. `end` is the value that
// would follow the largest: what is nearer to it is too large.
template <typename F>
F Nearest(float x, float end, uint8_t too_large, uint8_t nan) {
  const uint8_t sign = std::signbit(x) ? 0x80 : 0;
  if (std::isnan(x)) return F{static_cast<uint8_t>(nan | sign)};
  const double magnitude = std::fabs(static_cast<double>(x));
  double best_distance = std::fabs(magnitude - end);
  int best = too_large;
  for (int bits = too_large - 1; bits >= 0; --bits) {
    const double distance = std::fabs(magnitude - Decode(F{static_cast<uint8_t>(bits)}));
    if (distance > best_distance || (distance == best_distance && bits % 2 != 0)) continue;
    best_distance = distance;
    best = bits;
  }
  if (magnitude > end) best = too_large;
  return F{static_cast<uint8_t>(best | sign)};
}
inline void Encode(float x, Float8E4M3FN* out) { *out = Nearest<Float8E4M3FN>(x, 480, 0x7f, 0x7f); }
inline void Encode(float x, Float8E5M2* out) { *out = Nearest<Float8E5M2>(x, 65536, 0x7c, 0x7e); }

inline bool IsNan(Float8E4M3FN x) { return std::isnan(Decode(x)); }
inline bool IsNan(Float8E5M2 x) { return std::isnan(Decode(x)); }

}  // namespace jcoll::gpu

namespace elements {

using jcoll::gpu::DType;
using jcoll::gpu::ReduceOp;

template <typename T, DType kDType>
struct Type {
  using Storage = T;
  static constexpr DType dtype = kDType;
};

// Calls f(Type<...>) for every dtype.
template <typename F>
void ForEachType(F f) {
  using namespace jcoll;  // Of the storage types, some are jcoll's and some the language's.
#define JCOLL_DTYPE(enumerator, name, Storage, Accum) f(Type<Storage, gpu::DType::enumerator>());
#include "csrc/dtypes.def"
#undef JCOLL_DTYPE
  f(Type<gpu::Float8E4M3FN, gpu::DType::kF8E4M3FN>());
  f(Type<gpu::Float8E5M2, gpu::DType::kF8E5M2>());
}

using Random = std::mt19937;

// Any bits at all, so that NaN, infinities, denormals and both zeros come up, in one of 8 cases;
// else numbers whose sums and products are ordinary.
template <typename T>
T RandomElement(Random& random) {
  const int32_t small = static_cast<int32_t>(random() % 33) - 16;
  if (random() % 8 == 0) {
    uint32_t words[4] = {};
    for (uint32_t& word : words) word = static_cast<uint32_t>(random());
    T any;
    std::memcpy(&any, words, sizeof any);
    return any;
  }
  T value;
  if constexpr (std::is_arithmetic_v<T>) {
    value = static_cast<T>(static_cast<T>(small) / 4);
  } else if constexpr (sizeof(T) <= 2) {
    using jcoll::Encode;
    Encode(static_cast<float>(small) / 4, &value);
  } else {
    value = {static_cast<decltype(T::re)>(small) / 8, static_cast<decltype(T::re)>(small) / 4};
  }
  return value;
}
template <>
inline jcoll::Bool RandomElement(Random& random) {
  return {static_cast<uint8_t>(random() % 2)};
}

// Per rank so many elements.
template <typename T>
std::vector<std::vector<T>> RandomElements(int num_ranks, int64_t count, Random& random) {
  std::vector<std::vector<T>> all(num_ranks);
  for (auto& elements : all) {
    for (int64_t i = 0; i < count; ++i) elements.push_back(RandomElement<T>(random));
  }
  return all;
}

using Bytes = std::vector<uint8_t>;
inline std::vector<Bytes> RandomBytes(int num_ranks, int64_t nbytes, Random& random) {
  std::vector<Bytes> all(num_ranks, Bytes(nbytes));
  for (Bytes& bytes : all) {
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
  }
  return all;
}

inline jcoll::ReduceOp OnCpu(ReduceOp op) {
  switch (op) {
    case ReduceOp::kMean:
      return jcoll::ReduceOp::kMean;
    case ReduceOp::kMin:
      return jcoll::ReduceOp::kMin;
    case ReduceOp::kMax:
      return jcoll::ReduceOp::kMax;
    case ReduceOp::kProd:
      return jcoll::ReduceOp::kProd;
    default:
      return jcoll::ReduceOp::kSum;
  }
}

template <typename T>
T Reference(ReduceOp op, const std::vector<std::vector<T>>& inputs, int64_t i) {
  return jcoll::Reference(OnCpu(op), inputs, static_cast<int>(inputs.size()), i);
}

// The same bits, or two NaNs.
template <typename T>
bool Same(const T& a, const T& b) {
  using jcoll::IsNan;
  if constexpr (std::is_same_v<T, jcoll::Complex64> || std::is_same_v<T, jcoll::Complex128>) {
    return Same(a.re, b.re) && Same(a.im, b.im);
  } else {
    return std::memcmp(&a, &b, sizeof(T)) == 0 || (IsNan(a) && IsNan(b));
  }
}

// Expects `count` elements at p to be expected(i); tells of the first that is not.
template <typename T, typename Expected>
bool ExpectElements(const char* p, int64_t count, Expected expected) {
  for (int64_t i = 0; i < count; ++i) {
    T value;
    std::memcpy(&value, p + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
    if (Same<T>(value, expected(i))) continue;
    EXPECT_EQ(i, -1);  // The first wrong element.
    return false;
  }
  return true;
}

constexpr ReduceOp kReduceOps[] = {ReduceOp::kSum, ReduceOp::kMean, ReduceOp::kMin, ReduceOp::kMax,
                                   ReduceOp::kProd};

// Three ways to lie: aligned, misaligned alike, and each rank otherwise.
inline std::vector<int> Misalignments(int way, int element_nbytes) {
  const int unit = std::min(element_nbytes, 8);
  if (way % 3 == 0) return {0};
  if (way % 3 == 1) return {unit % 16};
  return {0, unit, 3 * unit % 16, 2 * unit % 16};
}

}  // namespace elements
