// Every kernel call after call on the same buffers and pads, without the host in between: each
// writes its input just before, and checks and overwrites its output just after. On a real GPU also
// as CUDA graphs that are replayed. Counters wrap around on the way. (schedules_test.cc does the
// same with random calls and delays, which a real GPU has not.)
#include "tests/cuda/plans.h"
#include "tests/cuda/rounds.h"
#ifdef JCOLL_EMULATOR
#include "tests/cuda/rounds.cu"  // As C++; nvcc compiles it on its own.
#endif

namespace {

using namespace plans;
using rounds::Job;
using rounds::Round;
using world::Handle;

constexpr Kernel kKernels[] = {Kernel::kAllReduceOneShot, Kernel::kAllReduceOneShotLL,
                               Kernel::kAllReduceTwoShot, Kernel::kReduceScatter,
                               Kernel::kAllGather,        Kernel::kAllToAll,
                               Kernel::kRaggedAllToAll,   Kernel::kBroadcast,
                               Kernel::kPlanSimple,       Kernel::kPlanLL};
constexpr int kNumRounds = world::kIsEmulated ? 12 : 1000;
constexpr int kRoundsPerGraph = 10;
constexpr int64_t kCount = world::kIsEmulated ? 60 : 5000;

template <typename T>
using Shared = std::vector<T, world::Allocator<T>>;

// One kernel's call on all ranks.
class Program {
 public:
  Program(World* world, Kernel kernel)
      : world_(*world),
        job_{kernel, world->num_ranks(), world->num_ranks() - 1, kCount},
        input_(world->num_ranks(), job_.input_count() * 4),
        output_(world->num_ranks(), job_.output_count() * 4),
        rounds_(world->num_ranks()) {
    Call call;
    call.kernel = kernel;
    call.dtype = DType::kS32;
    call.reduce_op = ReduceOp::kSum;
    call.count = kCount;
    call.root = job_.root;
    call.num_blocks = 2;
    call.peers.num_ranks = job_.num_ranks;
    if (jcoll::gpu::IsPlan(kernel)) {
      call.program = &Find("ring", PlanOp::kAllReduce, job_.num_ranks).program;
    }
    if (kernel == Kernel::kAllReduceOneShotLL) call.num_blocks = BlocksFor(call, world_.device());
    for (int r = 0; r < job_.num_ranks; ++r) {
      calls_.push_back(world_.ForRank(call, r, &input_, &output_));
      if (kernel == Kernel::kRaggedAllToAll) {
        calls_[r].rows = rounds::EvenRows(job_, r, rows_.emplace_back(3 * job_.num_ranks).data());
      }
    }
  }

  void Enqueue(int rank) {
    const cudaStream_t stream = Handle(world_.stream(rank));
    auto* input = reinterpret_cast<int32_t*>(input_[rank]);
    auto* output = reinterpret_cast<int32_t*>(output_[rank]);
    rounds::WriteInput(job_, rank, &rounds_[rank], input, stream);
    world_.Launch(calls_[rank]);
    rounds::CheckOutput(job_, rank, &rounds_[rank], output, stream);
  }

  // When nothing runs any more.
  void ExpectRounds(int num_rounds) {
    world_.ExpectNoErrors();
    for (int r = 0; r < job_.num_ranks; ++r) {
      EXPECT_EQ(rounds_[r].number, num_rounds);
      if (rounds_[r].num_wrong == 0) continue;
      EXPECT_EQ(std::string(Name(job_.kernel)) + " on rank " + std::to_string(r) + ", " +
                    std::to_string(rounds_[r].num_wrong) + " times, first in round " +
                    std::to_string(rounds_[r].first_wrong),
                "right");
    }
  }

 private:
  World& world_;
  const Job job_;
  Buffers input_, output_;
  Shared<Round> rounds_;
  std::deque<Shared<int64_t>> rows_;
  std::vector<Call> calls_;
};

// Calls f(&world, &program) for every kernel, on pads whose counters are about to wrap around.
template <typename F>
void ForEachKernel(F f) {
  for (int n : {2, 4, 8}) {
    if (world::kIsEmulated && n > 2) continue;  // schedules_test.cc does more there.
    for (Kernel kernel : kKernels) {
      World world(n);
      world.StartNearWrap();
      Program program(&world, kernel);
      f(&world, &program);
    }
  }
}

TEST(CallAfterCall) {
  ForEachKernel([](World* world, Program* program) {
    for (int round = 0; round < kNumRounds; ++round) {
      for (int r = 0; r < world->num_ranks(); ++r) program->Enqueue(r);
    }
    world->Synchronize();
    program->ExpectRounds(kNumRounds);
  });
}

#ifndef JCOLL_EMULATOR
using world::Check;

// One graph for each rank, as the ranks of a job have.
TEST(ReplayedGraphs) {
  ForEachKernel([](World* world, Program* program) {
    std::vector<cudaGraphExec_t> graphs(world->num_ranks());
    for (int r = 0; r < world->num_ranks(); ++r) {
      const cudaStream_t stream = Handle(world->stream(r));
      cudaGraph_t graph = nullptr;
      Check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed), "cudaStreamBeginCapture");
      for (int k = 0; k < kRoundsPerGraph; ++k) program->Enqueue(r);
      Check(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
      Check(cudaGraphInstantiateWithFlags(&graphs[r], graph, 0), "cudaGraphInstantiateWithFlags");
      Check(cudaGraphDestroy(graph), "cudaGraphDestroy");
    }
    for (int k = 0; k < kNumRounds / kRoundsPerGraph; ++k) {
      for (int r = 0; r < world->num_ranks(); ++r) {
        Check(cudaGraphLaunch(graphs[r], Handle(world->stream(r))), "cudaGraphLaunch");
      }
    }
    world->Synchronize();
    program->ExpectRounds(kNumRounds);
    for (cudaGraphExec_t graph : graphs) Check(cudaGraphExecDestroy(graph), "cudaGraphExecDestroy");
  });
}
#endif

}  // namespace
