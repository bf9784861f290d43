// The conversions of the 8-bit floats, exhaustively where that can be.
#include "cuda/kernels/elements.cuh"

#include "tests/cuda/elements.h"

namespace {

using jcoll::gpu::Float8E4M3FN;
using jcoll::gpu::Float8E5M2;

// Every value widens to what its definition says, and narrows back to itself.
template <typename F>
void CheckAllValues() {
  for (int bits = 0; bits < 256; ++bits) {
    const F x{static_cast<uint8_t>(bits)};
    const float wide = jcoll::gpu::Widen(x), expected = jcoll::gpu::Decode(x);
    EXPECT_EQ(std::isnan(wide), std::isnan(expected));
    if (std::isnan(wide)) continue;
    EXPECT(elements::Same(wide, expected));
    F back;
    jcoll::gpu::Narrow(wide, &back);
    EXPECT_EQ(back.bits, x.bits);
  }
}

template <typename F>
void CheckNarrow(float x) {
  F narrow, expected;
  jcoll::gpu::Narrow(x, &narrow);
  jcoll::gpu::Encode(x, &expected);
  if (!elements::Same(narrow, expected)) EXPECT_EQ(x, NAN);  // Which number went wrong.
}

// Every float with at most 6 bits of mantissa, more than any tie needs; and its two neighbours,
// which lie beside the ties.
template <typename F>
void CheckRounding() {
  for (uint32_t upper = 0; upper < 1u << 15; ++upper) {
    const float x = jcoll::gpu::BitCast<float>(upper << 17);
    for (float y : {x, std::nextafter(x, 0.f), std::nextafter(x, INFINITY)}) CheckNarrow<F>(y);
  }
}

TEST(AllValues) {
  CheckAllValues<Float8E4M3FN>();
  CheckAllValues<Float8E5M2>();
}
TEST(RoundingE4M3FN) { CheckRounding<Float8E4M3FN>(); }
TEST(RoundingE5M2) { CheckRounding<Float8E5M2>(); }

TEST(Overflow) {
  Float8E4M3FN x;
  jcoll::gpu::Narrow(464.f, &x);  // Half way to 480, which is not a number any more; 448 is even.
  EXPECT_EQ(x.bits, 0x7e);
  jcoll::gpu::Narrow(std::nextafter(464.f, 500.f), &x);
  EXPECT_EQ(x.bits, 0x7f);
  Float8E5M2 y;
  jcoll::gpu::Narrow(-1e30f, &y);
  EXPECT_EQ(y.bits, 0xfc);
}

}  // namespace
