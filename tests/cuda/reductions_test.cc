// Every kernel that reduces, with every dtype and operation that it has, against the reference,
// which it equals in every bit. (The emulated switch adds in the order of the ranks too.)
#include <algorithm>
#include <map>
#include <set>

#include "tests/cuda/elements.h"

namespace {

using namespace elements;
using namespace world;

constexpr Kernel kKernels[] = {Kernel::kAllReduceOneShot,         Kernel::kAllReduceOneShotLL,
                               Kernel::kAllReduceTwoShot,         Kernel::kAllReduceMultimemOneShot,
                               Kernel::kAllReduceMultimemTwoShot, Kernel::kReduceScatter};
constexpr int64_t kCounts[] = {0, 1, 3, 17, 255, 1025};

// Of each kernel with each dtype and operation, so many of kCounts.
int NumCounts(int num_ranks) {
#ifdef __SANITIZE_THREAD__
  return num_ranks == 3 ? 1 : 0;  // A tenth of the speed, and the same protocols for all types.
#else
  return num_ranks < 4 ? 3 : 2;
#endif
}

// Where the kernel does not promise the reference's bits: the switch rounds the sum, before the
// mean.
template <typename T>
bool IsNear(const T& got, const T& want, int num_ranks) {
  if constexpr (std::is_same_v<T, jcoll::Float16> || std::is_same_v<T, jcoll::BFloat16>) {
    const bool is_f16 = std::is_same_v<T, jcoll::Float16>;
    const float x = Decode(got), y = Decode(want);
    const float largest = is_f16 ? 65504 : 3.3895314e38f;
    if (std::isinf(x))
      return std::signbit(x) == std::signbit(y) && std::fabs(y) >= largest / num_ranks;
    const float unit = std::ldexp(1.0f, is_f16 ? -10 : -7),
                least = std::ldexp(1.0f, is_f16 ? -24 : -133);
    return std::isnan(y) ? std::isnan(x) : std::fabs(x - y) <= unit * std::fabs(y) + least;
  }
  return elements::Same<T>(got, want);
}

template <typename T>
void Check(World* world, const Call& call, Random& random) {
  const int n = world->num_ranks();
  const bool scatters = call.kernel == Kernel::kReduceScatter;
  const int64_t input_count = scatters ? n * call.count : call.count;
  const auto inputs = RandomElements<T>(n, input_count, random);
  // Multicast addresses need buffers that lie alike.
  const uint32_t num_ways = IsMultimem(call.kernel) ? 2 : 3;
  const int way = static_cast<int>(random() % num_ways);
  const int output_way = static_cast<int>(random() % num_ways);
  const bool is_exact = !IsMultimem(call.kernel) || call.reduce_op != ReduceOp::kMean;
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
    ok = ExpectElements<T>(output[r], call.count, [&](int64_t i) {
      const T want = Reference(call.reduce_op, inputs, first + i);
      T got;
      std::memcpy(&got, output[r] + i * element_nbytes, sizeof(T));
      return !is_exact && IsNear<T>(got, want, n) ? got : want;
    });
    ok = ok && ExpectElements<T>(input[r], input_count, [&](int64_t i) { return inputs[r][i]; });
  }
  if (ok) return;
  EXPECT_EQ(std::string(Name(call.kernel)) + " " + Name(call.dtype) + " op " +
                std::to_string(static_cast<int>(call.reduce_op)) + " count " +
                std::to_string(call.count) + " ranks " + std::to_string(n),
            "right");
}

// All of it, by some of the counts and ways for buffers to lie.
void CheckRanks(int num_ranks) {
  if (NumCounts(num_ranks) == 0) return;
  UseThreads(num_ranks < 4 ? 4 : 2);
  World world(num_ranks);
  Random random(static_cast<uint32_t>(num_ranks));
  std::map<Kernel, std::set<int64_t>> counts_of;
  int64_t counts[std::size(kCounts)];
  std::copy(std::begin(kCounts), std::end(kCounts), counts);
  ForEachType([&](auto type) {
    using T = typename decltype(type)::Storage;
    for (ReduceOp op : kReduceOps) {
      for (Kernel kernel : kKernels) {
        if (!CanRun(kernel)) continue;
        std::shuffle(std::begin(counts), std::end(counts), random);
        for (int k = 0; k < NumCounts(num_ranks); ++k) {
          Call call;
          call.kernel = kernel;
          call.dtype = type.dtype;
          call.reduce_op = op;
          call.count = counts[k];
          // As many as LL needs for the longest.
          call.num_blocks = call.count * static_cast<int64_t>(sizeof(T)) > 8192 ? 5 : 2;
          if (Refusal(world.ForRank(call, 0, nullptr, nullptr), world.device())) continue;
          counts_of[kernel].insert(call.count);
          Check<T>(&world, call, random);
        }
      }
    }
  });
  for (const auto& [kernel, tried] : counts_of) EXPECT_EQ(tried.size(), std::size(kCounts));
  EXPECT_EQ(counts_of.size(), kIsEmulated ? std::size(kKernels) : std::size(kKernels) - 2);
  UseThreads();
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
