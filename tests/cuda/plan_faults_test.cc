// Ranks that stop in the middle of plans: all others leave in time, and say who stopped, also those
// who waited for somebody else; nothing looks right, and nothing runs any more.
#include "tests/cuda/late_rank.h"
#include "tests/cuda/plans.h"

namespace {

using namespace plans;
using jcoll::gpu::ErrorKind;

constexpr int kNumRanks = 5, kStopped = 2;
constexpr int64_t kCount = 300;
#ifdef __SANITIZE_THREAD__
constexpr uint64_t kTimeoutNs = 1'000'000'000;
#else
constexpr uint64_t kTimeoutNs = 500'000'000;
#endif

struct Program {
  const char* algorithm;
  PlanOp op;
};
// By both, every rank waits for others in every call, if only by way of others.
constexpr Program kPrograms[] = {{"ring", PlanOp::kAllReduce},
                                 {"tree", PlanOp::kAllReduce},
                                 {"relay", PlanOp::kAllReduce},
                                 {"bruck", PlanOp::kAllToAll}};

struct Fixture {
  World world{kNumRanks};
  Buffers input, output;
  const Call call;

  Fixture(const Program& program, Kernel kernel)
      : Fixture(Find(program.algorithm, program.op, kNumRanks), kernel) {}
  Fixture(const Case& c, Kernel kernel)
      : input(kNumRanks, c.input_count(kCount) * 4),
        output(kNumRanks, c.output_count(kCount) * 4),
        call(MakeCall(c, kernel)) {
    world.set_timeout_ns(kTimeoutNs);
  }

  static Call MakeCall(const Case& c, Kernel kernel) {
    Call call = c.MakeCall(kernel, DType::kF32, ReduceOp::kSum, kCount);
    call.op_id = 17;
    return call;
  }

  bool IsPoisoned(int rank) {
    return elements::ExpectElements<float>(output[rank], output.nbytes() / 4,
                                           [](int64_t) { return NAN; });
  }

  // How many have given up. Those blame the one.
  int NumGivenUp() {
    int num_given_up = 0;
    for (int r = 0; r < kNumRanks; ++r) {
      const auto& error = world.error(r);
      if (r == kStopped || error.state == 0) continue;
      ++num_given_up;
      EXPECT_EQ(error.state, 2u);
      EXPECT_EQ(error.op_id, 17u);
      EXPECT_EQ(error.rank, r);
      EXPECT_EQ(error.peer, kStopped);
      EXPECT(error.kind == ErrorKind::kTimeout || error.kind == ErrorKind::kPeerGaveUp);
      EXPECT(IsPoisoned(r));
    }
    return num_given_up;
  }
};

TEST(RankThatNeverLaunches) {
  for (const Program& program : kPrograms) {
    for (Kernel kernel : kProtocols) {
      Fixture f(program, kernel);
      f.world.Run(f.call, &f.input, &f.output);  // A good one before.
      f.world.ExpectNoErrors();
      f.world.Run(f.call, &f.input, &f.output, /*absent=*/kStopped);
      EXPECT_EQ(f.NumGivenUp(), kNumRanks - 1);
    }
  }
}

// Those who were through before they could notice find out in the next call.
TEST(BlockThatStops) {
  constexpr int64_t kSteps[] = {1, 40, 90};
  int turn = 0;
  for (const Program& program : kPrograms) {
    for (Kernel kernel : kProtocols) {
      Fixture f(program, kernel);
      jcoll::emulator::StopBlock(kStopped, 1, kSteps[turn++ % std::size(kSteps)]);
      f.world.Run(f.call, &f.input, &f.output);
      f.world.Run(f.call, &f.input, &f.output, /*absent=*/kStopped);
      EXPECT_EQ(f.NumGivenUp(), kNumRanks - 1);
    }
  }
}

// As in faults_test.cc. By lines, nobody touches anything but scratch.
TEST(RankThatComesLate) {
  for (auto place : {late_rank::Place::kOutside, late_rank::Place::kInside}) {
    Fixture f({"ring", PlanOp::kAllReduce}, Kernel::kPlanSimple);
    late_rank::Run(&f.world, std::vector<Call>(kNumRanks, f.call), f.input, f.output, kStopped,
                   /*block=*/0, place, [&](int rank) { return f.IsPoisoned(rank); });
  }
}

// A root that only sends runs ahead of who does not read, but not for long.
TEST(RootThatIsNotRead) {
  Fixture f({"tree", PlanOp::kBroadcast}, Kernel::kPlanLL);
  int num_calls = 0;
  while (f.world.error(0).state == 0 && num_calls < 4) {
    f.world.Run(f.call, &f.input, &f.output, /*absent=*/kStopped);
    ++num_calls;
  }
  EXPECT_EQ(f.NumGivenUp(), kNumRanks - 1);
  EXPECT(num_calls < 4);
}

TEST(NextLaunchFailsAtOnce) {
  for (Kernel kernel : kProtocols) {
    Fixture f(kPrograms[0], kernel);
    f.world.Run(f.call, &f.input, &f.output, kStopped);
    f.world.set_timeout_ns(600'000'000'000);  // Would be noticed.
    for (int r = 0; r < kNumRanks; ++r) f.world.error(r) = {};
    f.output.Fill(0);
    f.world.Run(f.call, &f.input, &f.output);
    EXPECT_EQ(f.NumGivenUp(), kNumRanks - 1);
  }
}

}  // namespace
