// The 16-bit conversions, over all of their values, and the same through every variant of Reduce.

#include "csrc/float16.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "check.h"
#include "csrc/reduce.h"

namespace jcoll {
namespace {

constexpr int kNumPatterns = 1 << 16;

struct Format {
  DType dtype;
  int mantissa_bits, bias;
  float (*widen)(uint16_t);
  uint16_t (*narrow)(float);
  int infinity() const { return (2 * bias + 1) << mantissa_bits; }
  int quiet() const { return 1 << (mantissa_bits - 1); }
};

const Format kFormats[] = {
    {DType::kF16, 10, 15, [](uint16_t x) { return ToFloat(Float16{x}); },
     [](float x) { return ToFloat16(x).bits; }},
    {DType::kBF16, 7, 127, [](uint16_t x) { return ToFloat(BFloat16{x}); },
     [](float x) { return ToBFloat16(x).bits; }},
};

// By definition of the format.
double Value(const Format& f, int bits) {
  const int mantissa = bits & ((1 << f.mantissa_bits) - 1);
  const int exponent = (bits & 0x7fff) >> f.mantissa_bits;
  const double sign = bits & 0x8000 ? -1 : 1;
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - f.bias - f.mantissa_bits);
  const int significand = mantissa + (1 << f.mantissa_bits);
  return sign * std::ldexp(significand, exponent - f.bias - f.mantissa_bits);
}

uint16_t Quieted(const Format& f, int bits) {
  const bool is_nan = (bits & 0x7fff) > f.infinity();
  return static_cast<uint16_t>(is_nan ? bits | f.quiet() : bits);
}

TEST(EveryValueIsWidenedExactly) {
  for (const Format& f : kFormats) {
    int wrong = 0;
    for (int bits = 0; bits < kNumPatterns; ++bits) {
      const float got = f.widen(static_cast<uint16_t>(bits));
      const int magnitude = bits & 0x7fff;
      if (magnitude > f.infinity()) {
        wrong += !std::isnan(got);
      } else if (magnitude == f.infinity()) {
        wrong += !std::isinf(got);
      } else {
        wrong += static_cast<double>(got) != Value(f, bits);
      }
      wrong += std::signbit(got) != (bits >= 0x8000);
    }
    EXPECT_EQ(wrong, 0);
  }
}

TEST(EveryPatternComesBack) {
  for (const Format& f : kFormats) {
    int wrong = 0;
    for (int bits = 0; bits < kNumPatterns; ++bits) {
      const uint16_t got = f.narrow(f.widen(static_cast<uint16_t>(bits)));
      wrong += Quieted(f, got) != Quieted(f, bits);
    }
    EXPECT_EQ(wrong, 0);
  }
}

// Between every two neighbours, the last of them being infinity (whose place is that of the next
// power of two): the middle goes to the even one, and a float to either side of it to the nearer.
TEST(MiddlesRoundToEven) {
  for (const Format& f : kFormats) {
    int wrong = 0;
    for (int low = 0; low < f.infinity(); ++low) {
      const float middle = static_cast<float>((Value(f, low) + Value(f, low + 1)) / 2);
      const int even = low % 2 == 0 ? low : low + 1;
      for (const int sign : {0, 0x8000}) {
        const float x = sign == 0 ? middle : -middle;
        wrong += f.narrow(x) != (sign | even);
        wrong += f.narrow(std::nextafter(x, 0.0f)) != (sign | low);
        wrong += f.narrow(std::nextafter(x, x * 2)) != (sign | (low + 1));
      }
    }
    EXPECT_EQ(wrong, 0);
  }
}

TEST(OutOfRange) {
  for (const Format& f : kFormats) {
    const float inf = std::numeric_limits<float>::infinity();
    EXPECT_EQ(f.narrow(inf), f.infinity());
    EXPECT_EQ(f.narrow(-inf), 0x8000 | f.infinity());
    EXPECT_EQ(f.narrow(std::numeric_limits<float>::max()), f.infinity());
    EXPECT_EQ(f.narrow(std::numeric_limits<float>::denorm_min()), 0);
    EXPECT_EQ(f.narrow(-std::numeric_limits<float>::denorm_min()), 0x8000);
    for (uint32_t payload : {1u, 0x1fffu, 0x2000u, 0x3fffffu, 0x400000u, 0x7fffffu}) {
      EXPECT((f.narrow(BitsFloat(0x7f800000 | payload)) & 0x7fff) > f.infinity());
      EXPECT((f.narrow(BitsFloat(0xff800000 | payload)) & 0xffff) > (0x8000 | f.infinity()));
    }
  }
}

// Adds `addend` to all patterns with each instruction set; must give what the conversions above
// give, in vectors and in the tail, with denormals flushed (as XLA runs) and without.
void CheckSums(const Format& f, uint16_t addend) {
  std::vector<uint16_t> patterns(kNumPatterns - 5), addends(patterns.size(), addend);
  std::vector<uint16_t> expected(patterns.size()), got(patterns.size());
  for (size_t i = 0; i < patterns.size(); ++i) {
    patterns[i] = static_cast<uint16_t>(i + 5);
    expected[i] = f.narrow(f.widen(patterns[i]) + f.widen(addend));
  }
  const void* srcs[] = {patterns.data(), addends.data()};
  void* dst = got.data();
  Reduce(f.dtype, ReduceOp::kSum, srcs, 2, &dst, 1, static_cast<int64_t>(got.size()), false);
  int wrong = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    const bool both_nan = (got[i] & 0x7fff) > f.infinity() && (expected[i] & 0x7fff) > f.infinity();
    wrong += got[i] != expected[i] && !both_nan;
  }
  EXPECT_EQ(wrong, 0);
}

TEST(ReduceConvertsAlike) {
  const std::string best = IsaName();
  for (const char* isa : {"baseline", "avx2", "avx512"}) {
    if (!SetIsa(isa)) continue;
    for (const Format& f : kFormats) {
      for (int addend : {0, 0x8000, 1, 0x8001, 0x3c00, f.infinity() - 1, f.infinity()}) {
        CheckSums(f, static_cast<uint16_t>(addend));
        const ScopedFlushDenormals flush;
        CheckSums(f, static_cast<uint16_t>(addend));
      }
    }
  }
  SetIsa(best);
}

}  // namespace
}  // namespace jcoll
