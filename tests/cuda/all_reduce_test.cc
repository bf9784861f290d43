// all_reduce by each of its kernels against the reference, which it equals in every bit.
#include "tests/cuda/elements.h"

namespace {

using namespace elements;
using namespace world;

constexpr Kernel kKernels[] = {Kernel::kAllReduceOneShot, Kernel::kAllReduceTwoShot};
constexpr int64_t kCounts[] = {0, 1, 3, 17, 255, 1025};

Call MakeCall(Kernel kernel, DType dtype, ReduceOp op, int64_t count) {
  Call call;
  call.kernel = kernel;
  call.dtype = dtype;
  call.reduce_op = op;
  call.count = count;
  call.num_blocks = 2;
  return call;
}

template <typename T>
void Check(World* world, const Call& call, const std::vector<std::vector<T>>& inputs, int way) {
  const int64_t nbytes = call.count * static_cast<int64_t>(sizeof(T));
  const int n = world->num_ranks();
  Buffers input(n, nbytes, Misalignments(way, sizeof(T)));
  Buffers output(n, nbytes, Misalignments(way / 3 + way, sizeof(T)));
  output.Fill(0x5a);
  for (int r = 0; r < n; ++r) std::memcpy(input[r], inputs[r].data(), static_cast<size_t>(nbytes));
  world->Run(call, &input, &output);
  world->ExpectNoErrors();
  bool ok = true;
  for (int r = 0; r < n && ok; ++r) {
    ok = ExpectElements<T>(output[r], call.count,
                           [&](int64_t i) { return Reference(call.reduce_op, inputs, i); });
    ok = ok && std::memcmp(input[r], inputs[r].data(), static_cast<size_t>(nbytes)) == 0;
  }
  if (ok) return;
  EXPECT_EQ(std::string(Name(call.kernel)) + " " + Name(call.dtype) + " op " +
                std::to_string(static_cast<int>(call.reduce_op)) + " count " +
                std::to_string(call.count) + " ranks " + std::to_string(n),
            "right");
}

// Every dtype and operation; the counts, ways to lie and kernels take turns.
void CheckRanks(int num_ranks) {
  World world(num_ranks);
  Random random(static_cast<uint32_t>(num_ranks));
  int turn = 0;
  ForEachType([&](auto type) {
    using T = typename decltype(type)::Storage;
    for (ReduceOp op : kReduceOps) {
      for (Kernel kernel : kKernels) {
        for (int64_t count : kCounts) {
          const Call call = MakeCall(kernel, type.dtype, op, count);
          if (Refusal(world.ForRank(call, 0, nullptr, nullptr), {})) continue;
          Check(&world, call, RandomElements<T>(num_ranks, count, random), turn++);
        }
      }
    }
  });
  EXPECT(turn > 500);
}

TEST(OneRank) { CheckRanks(1); }
TEST(TwoRanks) { CheckRanks(2); }
TEST(ThreeRanks) { CheckRanks(3); }
TEST(FourRanks) { CheckRanks(4); }
TEST(FiveRanks) { CheckRanks(5); }
TEST(SixRanks) { CheckRanks(6); }
TEST(SevenRanks) { CheckRanks(7); }
TEST(EightRanks) { CheckRanks(8); }

}  // namespace
