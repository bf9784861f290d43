// Every kernel that reduces, with every dtype and operation that it has, against the reference,
// which it equals in every bit. (The emulated switch adds in the order of the ranks too.)
#include "tests/cuda/elements.h"

namespace {

using namespace elements;
using namespace world;

constexpr Kernel kKernels[] = {Kernel::kAllReduceOneShot,         Kernel::kAllReduceOneShotLL,
                               Kernel::kAllReduceTwoShot,         Kernel::kAllReduceMultimemOneShot,
                               Kernel::kAllReduceMultimemTwoShot, Kernel::kReduceScatter};
constexpr int64_t kCounts[] = {0, 1, 3, 17, 255, 1025};

// Whether the kernel promises the reference's bits: the switch rounds the sum before the mean.
bool IsExact(const Call& call) {
  const bool is_16_bit = call.dtype == DType::kF16 || call.dtype == DType::kBF16;
  return !(IsMultimem(call.kernel) && call.reduce_op == ReduceOp::kMean && is_16_bit);
}

template <typename T>
void Check(World* world, const Call& call, Random& random, int turn) {
  const int n = world->num_ranks();
  const bool scatters = call.kernel == Kernel::kReduceScatter;
  const int64_t input_count = scatters ? n * call.count : call.count;
  const auto inputs = RandomElements<T>(n, input_count, random);
  const int way = IsMultimem(call.kernel) ? turn % 2 : turn;
  const int output_way = IsMultimem(call.kernel) ? turn / 2 % 2 : turn + turn / 3;
  const int64_t element_nbytes = sizeof(T);
  Buffers input(n, input_count * element_nbytes, Misalignments(way, sizeof(T)));
  Buffers output(n, call.count * element_nbytes, Misalignments(output_way, sizeof(T)));
  for (int r = 0; r < n; ++r) input.Set(r, inputs[r]);
  output.Fill(0x5a);
  world->Run(call, &input, &output);
  world->ExpectNoErrors();
  bool ok = true;
  for (int r = 0; r < n && ok; ++r) {
    const int64_t first = scatters ? r * call.count : 0;
    ok = ExpectElements<T>(output[r], call.count,
                           [&](int64_t i) { return Reference(call.reduce_op, inputs, first + i); });
    ok = ok && ExpectElements<T>(input[r], input_count, [&](int64_t i) { return inputs[r][i]; });
  }
  if (ok) return;
  EXPECT_EQ(std::string(Name(call.kernel)) + " " + Name(call.dtype) + " op " +
                std::to_string(static_cast<int>(call.reduce_op)) + " count " +
                std::to_string(call.count) + " ranks " + std::to_string(n),
            "right");
}

// All of it; the ways for buffers to lie take turns.
void CheckRanks(int num_ranks) {
  World world(num_ranks);
  Random random(static_cast<uint32_t>(num_ranks));
  int turn = 0;
  ForEachType([&](auto type) {
    using T = typename decltype(type)::Storage;
    for (ReduceOp op : kReduceOps) {
      for (Kernel kernel : kKernels) {
        for (int64_t count : kCounts) {
          Call call;
          call.kernel = kernel;
          call.dtype = type.dtype;
          call.reduce_op = op;
          call.count = count;
          // As many as LL needs for the longest.
          call.num_blocks = count * static_cast<int64_t>(sizeof(T)) > 8192 ? 5 : 2;
          if (Refusal(world.ForRank(call, 0, nullptr, nullptr), world.device())) continue;
          if (!CanRun(kernel)) continue;
          // The larger the group, the more of the cases are left to the others.
          if (++turn % (1 + num_ranks / 4) != 0 || !IsExact(call)) continue;
          Check<T>(&world, call, random, turn);
        }
      }
    }
  });
  EXPECT(turn > 1000);
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
