// Many calls of all kernels on the same pads, with random delays everywhere: ranks run ahead of
// each other by whole calls, and inputs and outputs change hands as fast as the kernels allow.
#include "tests/cuda/schedules.h"
#include "tests/cuda/elements.h"
#include "tests/cuda/rounds.h"

namespace {

using namespace world;
using elements::Random;
using rounds::Job;
using schedules::OnRank;

// LL twice, so that its counters wrap around in time.
constexpr Kernel kKernels[] = {Kernel::kAllReduceOneShot,   Kernel::kAllReduceOneShotLL,
                               Kernel::kAllReduceOneShotLL, Kernel::kAllReduceTwoShot,
                               Kernel::kReduceScatter,      Kernel::kAllReduceMultimemOneShot,
                               Kernel::kAllGather,          Kernel::kAllReduceMultimemTwoShot,
                               Kernel::kAllToAll,           Kernel::kRaggedAllToAll,
                               Kernel::kBroadcast};
constexpr int64_t kMaxCount = 520;

// What a program does around a call, in stream order and without waiting for anybody: it writes the
// input before, and checks the output after.
class Program {
 public:
  Program(World* world, uint32_t seed)
      : world_(world),
        input_(world->num_ranks(), world->num_ranks() * kMaxCount * 4),
        output_(world->num_ranks(), world->num_ranks() * kMaxCount * 4),
        multicast_input_(input_.MakeMulticast()),
        multicast_output_(output_.MakeMulticast()),
        random_(seed) {}

  void Enqueue(int round) {
    EnqueueCall(kKernels[random_() % std::size(kKernels)], random_() % (kMaxCount + 1), round);
  }

  void EnqueueCall(Kernel kernel, int64_t count, int round) {
    Call call;
    call.kernel = kernel;
    call.dtype = DType::kS32;
    call.reduce_op = ReduceOp::kSum;
    call.count = count;
    call.root = static_cast<int32_t>(random_() % world_->num_ranks());
    call.num_blocks = 1 + random_() % 3;
    const Job job = {kernel, world_->num_ranks(), call.root, count};
    for (int r = 0; r < world_->num_ranks(); ++r) {
      Call own = world_->ForRank(call, r, &input_, &output_);
      own.peers.multicast_input = multicast_input_->address();
      own.peers.multicast_output = multicast_output_->address();
      if (call.kernel == Kernel::kRaggedAllToAll) {
        own.rows = rounds::EvenRows(job, r, rows_.emplace_back(3 * job.num_ranks).data());
      }
      OnRank(world_, r, [=] { WriteInput(job, r, round); });
      world_->Launch(own);
      OnRank(world_, r, [=] { CheckOutput(job, r, round); });
    }
  }

 private:
  void WriteInput(const Job& job, int rank, int round) {
    auto* input = reinterpret_cast<int32_t*>(input_[rank]);
    for (int64_t i = 0; i < job.input_count(); ++i) input[i] = rounds::Value(round, rank, i);
  }

  void CheckOutput(const Job& job, int rank, int round) {
    const auto* output = reinterpret_cast<const int32_t*>(output_[rank]);
    for (int64_t i = 0; i < job.output_count(); ++i) {
      if (output[i] == job.Expected(round, rank, i)) continue;
      EXPECT_EQ(std::string(Name(job.kernel)) + " in round " + std::to_string(round), "right");
      return;
    }
  }

  World* world_;
  Buffers input_, output_;
  std::unique_ptr<Multicast> multicast_input_, multicast_output_;
  std::deque<std::vector<int64_t>> rows_;  // Of ragged_all_to_all, as long as calls may read them.
  Random random_;
};

void RunSeed(int num_ranks, uint32_t seed, int num_rounds) {
  jcoll::emulator::Options options;
  options.delay_seed = seed;
  schedules::RunSeed(num_ranks, num_rounds, options, &SignalPad::line_epoch,
                     [&](World* world) { return std::make_unique<Program>(world, seed); });
}

TEST(TwoRanks) {
  for (uint32_t seed = 1; seed <= 6; ++seed) RunSeed(2, seed, 60);
}
TEST(ThreeRanks) {
  for (uint32_t seed = 1; seed <= 4; ++seed) RunSeed(3, seed, 60);
}
TEST(FiveRanks) {
  for (uint32_t seed = 1; seed <= 2; ++seed) RunSeed(5, seed, 60);
}

// The last place of the tables and of the pads, which all other tests leave free.
TEST(AsManyRanksAsATableHolds) {
  jcoll::emulator::Options options;
  options.threads_per_block = 1;
  jcoll::emulator::SetOptions(options);
  {
    World world(jcoll::gpu::kMaxRanks);
    world.StartNearWrap();
    Program program(&world, 3);
    int round = 0;
    for (const Kernel kernel : kKernels) program.EnqueueCall(kernel, 91, round++);
    world.Synchronize();
    world.ExpectNoErrors();
  }
  jcoll::emulator::SetOptions({});
}

// Messages without data keep the ranks as close together as others do: LL has no barrier.
TEST(EmptyMessagesByLines) {
  jcoll::emulator::Options options;
  options.delay_seed = 9;
  jcoll::emulator::SetOptions(options);
  {
    World world(3);
    Program program(&world, 9);
    for (int round = 0; round < 200; ++round) {
      const int64_t count = round % 2 == 0 ? kMaxCount : 0;
      program.EnqueueCall(Kernel::kAllReduceOneShotLL, count, round);
    }
    world.Synchronize();
    world.ExpectNoErrors();
  }
  jcoll::emulator::SetOptions({});
}

// What ranks wrote before a barrier, others read after it, and may overwrite after the next.
TEST(BarrierOrdersPrograms) {
  jcoll::emulator::Options options;
  options.delay_seed = 5;
  jcoll::emulator::SetOptions(options);
  {
    World world(3);
    int cells[3] = {};
    for (int round = 1; round <= 40; ++round) {
      for (int r = 0; r < 3; ++r) {
        const Call call = world.ForRank({}, r, nullptr, nullptr);
        OnRank(&world, r, [&cells, r, round] { cells[r] = round; });
        world.Launch(call);
        OnRank(&world, r, [&cells, round] {
          const bool right = cells[0] == round && cells[1] == round && cells[2] == round;
          if (!right) EXPECT_EQ("barrier in round " + std::to_string(round), "right");
        });
        world.Launch(call);
      }
    }
    world.Synchronize();
    world.ExpectNoErrors();
  }
  jcoll::emulator::SetOptions({});
}

}  // namespace
