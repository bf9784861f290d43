// Ranks that stop: all others leave in time, say for whom they waited, and return no result that
// looks right; nothing runs on that communicator any more.
#include "tests/cuda/elements.h"
#ifdef JCOLL_EMULATOR
#include "tests/cuda/late_rank.h"
#endif

namespace {

using namespace world;
using jcoll::gpu::ErrorKind;

constexpr int kNumRanks = 4, kStopped = 2;
constexpr int64_t kCount = 300;

// Much longer than a thread waits for a processor: else a rank may blame one that only was slow.
#ifdef __SANITIZE_THREAD__
constexpr uint64_t kTimeoutNs = 1'000'000'000;
#else
constexpr uint64_t kTimeoutNs = 150'000'000;
#endif

constexpr Kernel kKernels[] = {Kernel::kAllReduceOneShot,
                               Kernel::kAllReduceOneShotLL,
                               Kernel::kAllReduceTwoShot,
                               Kernel::kAllReduceMultimemOneShot,
                               Kernel::kAllReduceMultimemTwoShot,
                               Kernel::kReduceScatter,
                               Kernel::kAllGather,
                               Kernel::kAllToAll,
                               Kernel::kRaggedAllToAll,
                               Kernel::kBroadcast,
                               Kernel::kBarrier};

bool IsPoisoned(Kernel kernel, const Buffers& output, int rank) {
  if (kernel == Kernel::kBarrier) return true;  // It has no output.
  const bool is_per_rank = kernel == Kernel::kAllGather || kernel == Kernel::kAllToAll ||
                           kernel == Kernel::kRaggedAllToAll;
  return elements::ExpectElements<float>(output[rank], (is_per_rank ? kNumRanks : 1) * kCount,
                                         [](int64_t) { return NAN; });
}

struct Fixture {
  World world{kNumRanks};
  Buffers input{kNumRanks, kNumRanks * kCount * 4}, output{kNumRanks, kNumRanks * kCount * 4};
  // Of ragged_all_to_all: every rank sends every other a row.
  std::vector<int64_t, Allocator<int64_t>> from, sizes, to;

  Fixture() : from(kNumRanks), sizes(kNumRanks, 1) {
    world.set_timeout_ns(kTimeoutNs);
    for (int r = 0; r < kNumRanks; ++r) {
      from[r] = r;
      to.insert(to.end(), kNumRanks, r);
    }
  }

  // By rank.
  std::vector<Call> MakeCalls(Kernel kernel) const {
    Call call;
    call.kernel = kernel;
    call.reduce_op = ReduceOp::kSum;
    call.count = kCount;
    call.root = kStopped;
    call.op_id = 17;
    call.num_blocks = 2;
    call.rows.input_offsets = from.data();
    call.rows.send_sizes = sizes.data();
    call.rows.is_int64 = true;
    call.rows.row_nbytes = kCount * 4;
    call.rows.input_rows = call.rows.output_rows = kNumRanks;
    std::vector<Call> calls(kNumRanks, call);
    for (int r = 0; r < kNumRanks; ++r) calls[r].rows.output_offsets = &to[r * kNumRanks];
    return calls;
  }
};

// All but the one have given up, one of them after having waited for it. `all_blame_it`: for nobody
// else either.
void ExpectGivenUp(Fixture* f, Kernel kernel, uint32_t launch, bool all_blame_it) {
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
    EXPECT(IsPoisoned(kernel, f->output, r));
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
    const std::vector<Call> calls = f.MakeCalls(kernel);
    f.world.Run(calls, &f.input, &f.output);  // A good one before.
    f.world.ExpectNoErrors();
    f.world.Run(calls, &f.input, &f.output, /*absent=*/kStopped);
    ExpectGivenUp(&f, kernel, 1, /*all_blame_it=*/true);
  }
}

#ifdef JCOLL_EMULATOR
// At several places in the middle: before its first barrier, in it, and later.
TEST(BlockThatStops) {
  constexpr int64_t kSteps[] = {0, 3, 9, 14};
  for (size_t k = 0; k < std::size(kKernels); ++k) {
    const Kernel kernel = kKernels[k];
    for (size_t i : {k, k + 2}) {  // Two of them.
      const int64_t step = kSteps[i % std::size(kSteps)];
      // Who has its signal passes the barrier, and finds out in the next call.
      if (kernel == Kernel::kBarrier && step == 14) continue;
      Fixture f;
      const std::vector<Call> calls = f.MakeCalls(kernel);
      jcoll::emulator::StopBlock(kStopped, 1, step);
      f.world.Run(calls, &f.input, &f.output);
      if (f.world.error(0).state == 0 && f.world.error(1).state == 0) {
        EXPECT(step > 3);  // It had nothing left to tell the others.
        continue;
      }
      // A rank that got past the first barrier may wait for one that did not.
      ExpectGivenUp(&f, kernel, 0, /*all_blame_it=*/false);
    }
  }
}

// A rank may come just when its peers give up. It must not touch what is theirs again: neither when
// it comes after them, nor, as they wait for it then, when it got in before.
TEST(RankThatComesLate) {
  using late_rank::Place;
  for (Kernel kernel : kKernels) {
    for (Place place : {Place::kOutside, Place::kInside}) {
      // Some of those that read, and that store.
      const bool stays_inside = kernel == Kernel::kReduceScatter || kernel == Kernel::kAllToAll ||
                                kernel == Kernel::kAllReduceMultimemTwoShot;
      if (place == Place::kInside && !stays_inside) continue;
      Fixture f;
      const std::vector<Call> calls = f.MakeCalls(kernel);
      late_rank::Run(&f.world, calls, f.input, f.output, kStopped, /*block=*/1, place,
                     [&](int rank) { return IsPoisoned(kernel, f.output, rank); });
    }
  }
}

// Two launches at once would use the same counters.
TEST(LaunchesThatOverlap) {
  World world(1);
  Stream second(0);
  Buffers input(1, kCount * 4), output(1, kCount * 4);
  Call call;
  call.kernel = Kernel::kAllGather;
  call.count = kCount;
  call.num_blocks = 1;
  call = world.ForRank(call, 0, &input, &output);
  jcoll::emulator::HoldBlock(0, 0, late_rank::StepsTo(late_rank::Place::kOutside, 1, 0));
  world.Launch(call);
  late_rank::Await([&] { return __atomic_load_n(&world.pad(0).owned, __ATOMIC_RELAXED) != 0; });
  EXPECT_EQ(jcoll::gpu::Launch(call, Handle(second)), cudaSuccess);
  second.Synchronize();
  EXPECT_EQ(world.error(0).state, 2u);
  EXPECT(world.error(0).kind == ErrorKind::kLaunchesOverlap);
  EXPECT_EQ(world.error(0).rank, 0);
  jcoll::emulator::LetGo();
  world.Synchronize();
}
#endif

TEST(NextLaunchFailsAtOnce) {
  for (Kernel kernel : {Kernel::kAllReduceOneShotLL, Kernel::kReduceScatter, Kernel::kAllGather}) {
    Fixture f;
    const std::vector<Call> calls = f.MakeCalls(kernel);
    f.world.Run(calls, &f.input, &f.output, kStopped);
    f.world.set_timeout_ns(600'000'000'000);  // Would be noticed.
    for (int r = 0; r < kNumRanks; ++r) f.world.error(r) = {};
    f.output.Fill(0);
    f.world.Run(calls, &f.input, &f.output);
    for (int r = 0; r < kNumRanks; ++r) {
      EXPECT_EQ(f.world.error(r).state, 2u);
      EXPECT(f.world.error(r).kind == ErrorKind::kPeerGaveUp);
      EXPECT_EQ(f.world.error(r).peer, kStopped);
      EXPECT(IsPoisoned(kernel, f.output, r));
    }
  }
}

// The record is the first failure's.
TEST(FirstRecordStays) {
  Fixture f;
  const std::vector<Call> calls = f.MakeCalls(Kernel::kAllReduceTwoShot);
  f.world.Run(calls, &f.input, &f.output, kStopped);
  const uint32_t launch = f.world.error(0).call;
  f.world.Run(calls, &f.input, &f.output);
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
