// Many calls by many plans on the same pads and slots, with random delays everywhere: what a plan
// leaves, the next one finds, while ranks run ahead of each other.
#include <chrono>
#include <thread>

#include "tests/cuda/plans.h"
#include "tests/cuda/rounds.h"
#include "tests/cuda/schedules.h"

namespace {

using namespace plans;
using rounds::Value;
using schedules::OnRank;

constexpr int64_t kMaxCount = 150;
constexpr int64_t kLongCount = 300'001;  // 5 turns of one block, or more.
#ifdef __SANITIZE_THREAD__
constexpr uint32_t kNumLong = 1;  // A tenth of the speed.
#else
constexpr uint32_t kNumLong = 4;
#endif

// Around a call, in stream order and without waiting for anybody: every rank writes its input
// before, and checks its output after.
class Program {
 public:
  Program(World* world, uint32_t seed, int64_t nbytes)
      : world_(world),
        cases_(OfRanks(world->num_ranks())),
        input_(world->num_ranks(), nbytes),
        output_(world->num_ranks(), nbytes),
        random_(seed) {}

  // The rank comes so much later to every call.
  void DelayRank(int rank, std::chrono::milliseconds delay) {
    delayed_rank_ = rank;
    delay_ = delay;
  }

  // Any plan.
  void Enqueue(int round) {
    const Case& c = *cases_[random_() % cases_.size()];
    const int64_t count = random_() % (kMaxCount + 1);
    const Kernel kernel = kProtocols[random_() % 4 == 0 ? 0 : 1];  // LL has no barrier at all.
    Enqueue(round, c, kernel, count, 1 + static_cast<int>(random_() % 2));
  }

  void Enqueue(int round, const Case& c, Kernel kernel, int64_t count, int num_blocks) {
    Call call = c.MakeCall(kernel, DType::kS32, ReduceOp::kSum, count);
    call.num_blocks = num_blocks;
    const auto expected = Expected(c, count, round);
    for (int r = 0; r < world_->num_ranks(); ++r) {
      OnRank(world_, r, [=, &c] {
        if (r == delayed_rank_) std::this_thread::sleep_for(delay_);
        Write(r, Input(c, count, round, r));
      });
      world_->Launch(world_->ForRank(call, r, &input_, &output_));
      OnRank(world_, r, [=, &c, result = expected[r]] {
        if (std::equal(result.begin(), result.end(), output_[r],
                       [](uint8_t a, char b) { return a == static_cast<uint8_t>(b); })) {
          return;
        }
        EXPECT_EQ(c.name() + " by " + Name(kernel) + " in round " + std::to_string(round), "right");
      });
    }
  }

 private:
  static Bytes Input(const Case& c, int64_t count, int round, int rank) {
    Bytes bytes;
    for (int64_t i = 0; i < c.input_count(count); ++i) {
      const int32_t value = Value(round, rank, i);
      const auto* first = reinterpret_cast<const uint8_t*>(&value);
      bytes.insert(bytes.end(), first, first + sizeof(value));
    }
    return bytes;
  }
  void Write(int rank, const Bytes& bytes) {
    std::copy(bytes.begin(), bytes.end(), reinterpret_cast<uint8_t*>(input_[rank]));
  }

  std::vector<Bytes> Expected(const Case& c, int64_t count, int round) const {
    std::vector<Bytes> inputs;
    for (int r = 0; r < world_->num_ranks(); ++r) inputs.push_back(Input(c, count, round, r));
    return OnOneThread(c, DType::kS32, ReduceOp::kSum, count, inputs).Run();
  }

  World* world_;
  std::vector<const Case*> cases_;
  Buffers input_, output_;
  Random random_;
  int delayed_rank_ = -1;
  std::chrono::milliseconds delay_{};
};

void RunSeed(int num_ranks, uint32_t seed, int num_rounds) {
  jcoll::emulator::Options options;
  options.delay_seed = seed;
  options.threads_per_block = 3;
  schedules::RunSeed(num_ranks, num_rounds, options, &jcoll::gpu::SignalPad::plan_lines,
                     [&](World* world) {
                       return std::make_unique<Program>(world, seed, num_ranks * kMaxCount * 4);
                     });
}

TEST(TwoRanks) {
  for (uint32_t seed = 1; seed <= 5; ++seed) RunSeed(2, seed, 60);
}
TEST(ThreeRanks) {
  for (uint32_t seed = 1; seed <= 4; ++seed) RunSeed(3, seed, 60);
}
TEST(FiveRanks) {
  for (uint32_t seed = 1; seed <= 2; ++seed) RunSeed(5, seed, 60);
}

// Slots that are used again within a call, also by ranks who wait for nothing but that: those who
// only send.
TEST(SeveralTurns) {
  jcoll::emulator::Options options;
  options.threads_per_block = 2;
  options.max_delay_us = 3000;  // Longer than a peer takes for a turn.
  for (options.delay_seed = 1; options.delay_seed <= kNumLong; ++options.delay_seed) {
    jcoll::emulator::SetOptions(options);
    World world(3);
    Program program(&world, options.delay_seed, kLongCount * 4);
    int round = 0;
    for (const Case* each :
         {&Find("relay", PlanOp::kAllReduce, 3), &Find("binomial", PlanOp::kReduce, 3),
          &Find("binomial", PlanOp::kReduce, 3), &Find("tree", PlanOp::kBroadcast, 3)}) {
      const Case& c = *each;
      program.Enqueue(round++, c, Kernel::kPlanSimple, kLongCount, 1);
      program.Enqueue(round++, c, Kernel::kPlanLL, 14'000, 1);
    }
    world.Synchronize();
    world.ExpectNoErrors();
  }
  jcoll::emulator::SetOptions({});
}

// By lines, ranks that only send could be whole calls ahead of one that comes late.
TEST(LateReceiver) {
  World world(3);
  Program program(&world, 1, 3 * kMaxCount * 4);
  program.DelayRank(0, std::chrono::milliseconds(20));  // Also where cores are scarce.
  for (int round = 0; round < 12; ++round) {
    const PlanOp op = round % 6 == 5 ? PlanOp::kBroadcast : PlanOp::kReduce;
    program.Enqueue(round, Find("tree", op, 3), Kernel::kPlanLL, kMaxCount - round, 1);
  }
  world.Synchronize();
  world.ExpectNoErrors();
}

}  // namespace
