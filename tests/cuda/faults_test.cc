// Ranks that stop: all others leave in time, say for whom they waited, and return no result that
// looks right; nothing runs on that communicator any more.
#include "tests/cuda/elements.h"

namespace {

using namespace world;
using jcoll::gpu::ErrorKind;

constexpr int kNumRanks = 4, kStopped = 2;
constexpr int64_t kCount = 300;

// Much longer than a thread waits for a processor: else a rank may blame one that only was slow.
#ifdef __SANITIZE_THREAD__
constexpr uint64_t kTimeoutNs = 600'000'000;
constexpr int64_t kSteps[] = {0, 9};
#else
constexpr uint64_t kTimeoutNs = 150'000'000;
constexpr int64_t kSteps[] = {0, 3, 9, 14};
#endif

constexpr Kernel kKernels[] = {Kernel::kAllReduceOneShot,
                               Kernel::kAllReduceOneShotLL,
                               Kernel::kAllReduceTwoShot,
                               Kernel::kAllReduceMultimemOneShot,
                               Kernel::kAllReduceMultimemTwoShot,
                               Kernel::kReduceScatter,
                               Kernel::kAllGather,
                               Kernel::kAllToAll,
                               Kernel::kBroadcast};

Call MakeCall(Kernel kernel) {
  Call call;
  call.kernel = kernel;
  call.reduce_op = ReduceOp::kSum;
  call.count = kCount;
  call.root = kStopped;
  call.op_id = 17;
  call.num_blocks = 2;
  return call;
}

bool IsPoisoned(const Call& call, const Buffers& output, int rank) {
  const int blocks =
      call.kernel == Kernel::kAllGather || call.kernel == Kernel::kAllToAll ? kNumRanks : 1;
  return elements::ExpectElements<float>(output[rank], blocks * kCount,
                                         [](int64_t) { return NAN; });
}

struct Fixture {
  World world{kNumRanks};
  Buffers input{kNumRanks, kNumRanks * kCount * 4}, output{kNumRanks, kNumRanks * kCount * 4};
  Fixture() { world.set_timeout_ns(kTimeoutNs); }
};

// All but the one have given up, one of them after having waited for it. `all_blame_it`: for nobody
// else either.
void ExpectGivenUp(Fixture* f, const Call& call, uint32_t launch, bool all_blame_it) {
  int num_timeouts = 0;
  for (int r = 0; r < kNumRanks; ++r) {
    if (r == kStopped) continue;
    const ErrorRecord& error = f->world.error(r);
    EXPECT_EQ(error.state, 2u);
    EXPECT_EQ(error.op_id, 17u);
    EXPECT_EQ(error.call, launch);
    EXPECT_EQ(error.rank, r);
    EXPECT(error.peer == kStopped || !all_blame_it);
    EXPECT(error.kind == ErrorKind::kTimeout || error.kind == ErrorKind::kPeerGaveUp);
    EXPECT(IsPoisoned(call, f->output, r));
    if (error.kind != ErrorKind::kTimeout) continue;
    num_timeouts += error.peer == kStopped;
    EXPECT(error.waited_ns >= kTimeoutNs && error.waited_ns < 50 * kTimeoutNs);
    EXPECT(error.seen != error.expected);
  }
  EXPECT(num_timeouts >= 1);
}

TEST(RankThatNeverLaunches) {
  for (Kernel kernel : kKernels) {
    if (!CanRun(kernel)) continue;
    Fixture f;
    const Call call = MakeCall(kernel);
    f.world.Run(call, &f.input, &f.output);  // A good one before.
    f.world.ExpectNoErrors();
    f.world.Run(call, &f.input, &f.output, /*absent=*/kStopped);
    ExpectGivenUp(&f, call, 1, /*all_blame_it=*/true);
  }
}

#ifdef JCOLL_EMULATOR
// At several places in the middle: before its first barrier, in it, and later.
TEST(BlockThatStops) {
  for (Kernel kernel : kKernels) {
    for (int64_t step : kSteps) {
      Fixture f;
      const Call call = MakeCall(kernel);
      jcoll::emulator::StopBlock(kStopped, 1, step);
      f.world.Run(call, &f.input, &f.output);
      if (f.world.error(0).state == 0 && f.world.error(1).state == 0) {
        EXPECT(step > 3);  // It had nothing left to tell the others.
        continue;
      }
      // A rank that got past the first barrier may wait for one that did not.
      ExpectGivenUp(&f, call, 0, /*all_blame_it=*/false);
    }
  }
}
#endif

TEST(NextLaunchFailsAtOnce) {
  for (Kernel kernel : kKernels) {
    if (!CanRun(kernel)) continue;
    Fixture f;
    const Call call = MakeCall(kernel);
    f.world.Run(call, &f.input, &f.output, kStopped);
    f.world.set_timeout_ns(600'000'000'000);  // Would be noticed.
    for (int r = 0; r < kNumRanks; ++r) f.world.error(r) = {};
    f.output.Fill(0);
    f.world.Run(call, &f.input, &f.output);
    for (int r = 0; r < kNumRanks; ++r) {
      EXPECT_EQ(f.world.error(r).state, 2u);
      EXPECT(f.world.error(r).kind == ErrorKind::kPeerGaveUp);
      EXPECT_EQ(f.world.error(r).peer, kStopped);
      EXPECT(IsPoisoned(call, f.output, r));
    }
  }
}

// The record is the first failure's, until the host has taken it.
TEST(FirstRecordStays) {
  Fixture f;
  const Call call = MakeCall(Kernel::kAllReduceTwoShot);
  f.world.Run(call, &f.input, &f.output, kStopped);
  const uint32_t launch = f.world.error(0).call;
  f.world.Run(call, &f.input, &f.output);
  EXPECT_EQ(f.world.error(0).call, launch);
}

template <typename T>
void ExpectPoison(DType dtype, const T& expected) {
  World world(2);
  world.set_timeout_ns(1'000'000);
  Call call;
  call.kernel = Kernel::kBroadcast;
  call.dtype = dtype;
  call.count = 21;
  Buffers input(2, 21 * sizeof(T)), output(2, 21 * sizeof(T));
  world.Run(call, &input, &output, /*absent=*/1);
  EXPECT(elements::ExpectElements<T>(output[0], 21, [&](int64_t) { return expected; }));
}

TEST(PoisonOfEveryType) {
  elements::ForEachType([](auto type) {
    using T = typename decltype(type)::Storage;
    using jcoll::Encode;
    T expected;
    if constexpr (std::is_integral_v<T>) {
      expected = std::numeric_limits<T>::max();
    } else if constexpr (std::is_floating_point_v<T>) {
      expected = NAN;
    } else if constexpr (std::is_same_v<T, jcoll::Bool>) {
      expected = {1};
    } else if constexpr (sizeof(T) <= 2) {
      Encode(NAN, &expected);
    } else {
      expected = {NAN, NAN};
    }
    ExpectPoison<T>(type.dtype, expected);
  });
}

}  // namespace
