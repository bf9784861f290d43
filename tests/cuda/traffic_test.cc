// The bytes that cross the links are those of the formulas.
#include "tests/cuda/world.h"

namespace {

using namespace world;

constexpr int64_t kCount = 8 * 3 * 5 * 7 * 32;  // Divides into equal parts of whole lines.

// Runs the kernel with blocks of kCount floats, and calls check(rank, what the rank moved).
template <typename F>
void Measure(Kernel kernel, int n, int64_t count, F check) {
  World world(n);
  Call call;
  call.kernel = kernel;
  call.reduce_op = ReduceOp::kSum;
  call.count = count;
  call.root = n - 1;
  Buffers input(n, n * count * 4), output(n, n * count * 4);
  ResetTraffic();
  world.Run(call, &input, &output);
  world.ExpectNoErrors();
  for (int r = 0; r < n; ++r) check(r, TrafficOf(r));
}

void Expect(Kernel kernel, int n, int64_t count, int64_t loaded, int64_t stored) {
  Measure(kernel, n, count, [&](int, const Traffic& traffic) {
    EXPECT_EQ(traffic.loaded, loaded);
    EXPECT_EQ(traffic.stored, stored);
  });
}

constexpr int64_t kM = kCount * 4;

TEST(AllReduceOneShot) {
  for (int n = 1; n <= 8; ++n) Expect(Kernel::kAllReduceOneShot, n, kCount, (n - 1) * kM, 0);
}

TEST(AllReduceOneShotLL) {
  constexpr int64_t kSmall = 2048;
  for (int n = 1; n <= 8; ++n) {
    Expect(Kernel::kAllReduceOneShotLL, n, kSmall, 0, 2 * (n - 1) * kSmall * 4);
  }
}

TEST(AllReduceTwoShot) {
  for (int n : {1, 2, 3, 4, 5, 6, 7, 8}) {
    Expect(Kernel::kAllReduceTwoShot, n, kCount, (n - 1) * kM / n, (n - 1) * kM / n);
  }
}

// The switch answers one load with one vector, and takes one for all.
TEST(AllReduceMultimem) {
  for (int n = 2; n <= 8; ++n) {
    Expect(Kernel::kAllReduceMultimemOneShot, n, kCount, kM, 0);
    Expect(Kernel::kAllReduceMultimemTwoShot, n, kCount, kM / n, kM / n);
  }
}

// Of the N M bytes of an input, and of an output.
TEST(ReduceScatterAllGatherAllToAll) {
  for (int n = 1; n <= 8; ++n) {
    Expect(Kernel::kReduceScatter, n, kCount, (n - 1) * kM, 0);
    Expect(Kernel::kAllGather, n, kCount, 0, (n - 1) * kM);
    Expect(Kernel::kAllToAll, n, kCount, 0, (n - 1) * kM);
  }
}

TEST(Broadcast) {
  for (int n = 2; n <= 8; ++n) {
    int64_t through_root = 0;
    Measure(Kernel::kBroadcast, n, kCount, [&](int r, const Traffic& traffic) {
      const bool is_root = r == n - 1;
      EXPECT_EQ(traffic.loaded, is_root ? 0 : kM / n);
      EXPECT_EQ(traffic.stored, is_root ? (n - 1) * kM / n : (n - 2) * kM / n);
      through_root += is_root ? traffic.stored : traffic.loaded;
    });
    EXPECT_EQ(through_root, 2 * (n - 1) * kM / n);
  }
}

}  // namespace
