// What ranks must have in common, and what happens where they have not: builds, plans, places of
// arrays in XLA's windows, the order of what they tell each other.

#include <algorithm>
#include <cstring>

#include "check.h"
#include "csrc/plan_store.h"
#include "fake_kernels.h"
#include "job.h"

namespace {

using fake::AllReduce;
using fake::Errors;
using fake::Job;
using fake::With;
using fake::Xla;

constexpr auto kPrepare = XLA_FFI_ExecutionStage_PREPARE;
constexpr auto kInitialize = XLA_FFI_ExecutionStage_INITIALIZE;

void Reset() {
  fake::Reset();
  fake::ResetKernels();
}

bool Says(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return true;
  std::fprintf(stderr, "  not \"%s\" in: %s\n", part.c_str(), text.c_str());
  return false;
}

// An encoded all_reduce of two ranks: rank 0 adds and sends the sum, or both add.
std::string Exchange(bool first_adds) {
  constexpr int32_t kSend = 0, kRecv = 1, kRecvReduce = 2, kInput = 0, kOutput = 1;
  std::vector<int32_t> steps, first_step = {0};
  for (int32_t r = 0; r < 2; ++r) {
    const int32_t peer = 1 - r;
    const auto add = [&](int32_t kind, int32_t src, int32_t dst) {
      steps.insert(steps.end(), {r, kind, peer, src, 0, dst, 0, 1});
    };
    if (first_adds) {
      if (r == 0) {
        add(kRecvReduce, kInput, kOutput);
        add(kSend, kOutput, 0);
      } else {
        add(kSend, kInput, 0);
        add(kRecv, 0, kOutput);
      }
    } else {
      add(kSend, kInput, 0);
      add(kRecvReduce, kInput, kOutput);
    }
    first_step.push_back(static_cast<int32_t>(steps.size() / 8));
  }
  std::vector<int32_t> words = {
      'J' | 'C' << 8 | 'P' << 16 | 'L' << 24, 1, 0, 0, 2, 0, 1, 0, first_step.back(), 0};
  words.insert(words.end(), first_step.begin(), first_step.end());
  words.insert(words.end(), steps.begin(), steps.end());
  words[2] = static_cast<int32_t>(words.size());
  return std::string(reinterpret_cast<const char*>(words.data()), words.size() * 4);
}

// Rank 1 runs another job than the rest.
Errors RunBoth(Job& job, Job& deviant) {
  Errors errors(job.num_ranks());
  fake::OnAll(job.num_ranks(), [&](int rank) {
    Job& mine = rank == 1 ? deviant : job;
    errors[rank] =
        mine.instruction->RunAll(rank, mine.inputs[rank], mine.outputs[rank], mine.streams[rank]);
  });
  return errors;
}

}  // namespace

TEST(AnotherPlanOfTheSameName) {
  Reset();
  const auto instantiate = [](Job& job, bool first_adds) {
    jcoll::SetPlanMaker([first_adds](const jcoll::PlanKey&) {
      return std::variant<std::string, jcoll::Failure>(Exchange(first_adds));
    });
    jcoll::ForgetPlans();
    EXPECT_EQ(job.Instantiate().value_or("ok"), "ok");
  };
  Xla xla;
  const auto attributes = With(AllReduce(2, "mine"), {{"plan_op", "all_reduce"}});
  Job job(&xla, attributes), same(&xla, attributes), deviant(&xla, attributes);
  instantiate(job, true);
  instantiate(same, true);
  instantiate(deviant, false);
  EXPECT(fake::AllWell(RunBoth(job, same)));
  Job late(&xla, attributes);
  instantiate(late, true);
  const auto errors = RunBoth(late, deviant);
  EXPECT(fake::AllSay(errors, "is at another collective than rank"));
  EXPECT(fake::AllSay(errors, "or has another plan for it"));
  jcoll::SetPlanMaker(nullptr);
  jcoll::ForgetPlans();
}

TEST(AnotherBuild) {
  Reset();
  Xla xla;
  xla.make_group = [](fake::Group* group) {
    group->spoil = [](int rank, std::string* part) {
      const size_t at = part->find(JCOLL_CUDA_SOURCES);
      if (rank == 1 && at != std::string::npos) part->replace(at, 4, "0000");
    };
  };
  Job job(&xla, AllReduce(2));
  EXPECT(!job.Instantiate());
  EXPECT(fake::AllSay(job.Run(), "run different builds of jcoll's CUDA library"));
}

TEST(NoCodeForADevice) {
  Reset();
  fake::devices().facts[1] = {90, 108};
  fake::devices().no_code[90] = "the kernels were compiled for 80-real";
  Xla xla;
  Job job(&xla, AllReduce(2, "two_shot"));
  EXPECT(!job.Instantiate());
  EXPECT(fake::AllSay(job.Run(), "on rank 1 the kernels were compiled for 80-real"));
  Job by_nccl(&xla, AllReduce(2));
  EXPECT(!by_nccl.Instantiate());
  EXPECT(fake::AllWell(by_nccl.Run()));
  EXPECT_EQ(by_nccl.HostCalls(0).size(), 1);
}

TEST(ExchangesOutOfStep) {
  Reset();
  Xla xla;
  xla.make_group = [](fake::Group* group) {
    group->spoil = [](int rank, std::string* part) {
      uint32_t number = 0;
      std::memcpy(&number, part->data(), sizeof(number));
      number += rank == 1 && number == 1;
      std::memcpy(part->data(), &number, sizeof(number));
    };
  };
  Job job(&xla, AllReduce(2));
  EXPECT(!job.Instantiate());
  const auto errors = job.Run();
  EXPECT(fake::AllSay(errors, "the ranks of a communicator are out of step"));
  EXPECT(Says(errors[0].value_or("ok"), "rank 1 tells whether all is well (exchange 2)"));
}

TEST(AnImageThatCannotBeUploaded) {
  Reset();
  jcoll::SetPlanMaker([](const jcoll::PlanKey&) {
    return std::variant<std::string, jcoll::Failure>(Exchange(true));
  });
  Xla xla;
  Job pads(&xla, AllReduce(2, "two_shot"));
  EXPECT(!pads.Instantiate());
  EXPECT(fake::AllWell(pads.Run()));
  Job job(&xla, With(pads.attributes, {{"algorithm", "mine"}, {"plan_op", "all_reduce"}}));
  EXPECT(!job.Instantiate());
  fake::devices().memory_is_full_on = 1;
  EXPECT(fake::AllSay(job.Run(), "on rank 1: jcoll: cudaMalloc failed"));
  fake::devices().memory_is_full_on = -1;
  EXPECT(fake::AllWell(job.Run()));  // Nobody is out of step.
  jcoll::SetPlanMaker(nullptr);
  jcoll::ForgetPlans();
}

TEST(ArraysElsewhereInAWindow) {
  Reset();
  Xla xla;
  xla.moves_windows[1] = 4096;
  Job job(&xla, AllReduce(3, "two_shot"));
  EXPECT(!job.Instantiate());
  EXPECT(fake::AllWell(job.Run()));
  EXPECT(
      fake::Has(fake::TakeLog(), "rank 1's arrays lie elsewhere in XLA's windows than rank 0's"));
  const auto launched = fake::TakeLaunched();
  EXPECT_EQ(launched.size(), 3);
  for (int rank = 0; rank < 3; ++rank) {  // Copies, which all ranks have at one place.
    EXPECT(launched[0].call.peers.input[rank] == launched[1].call.peers.input[rank]);
    EXPECT(launched[0].call.peers.input[rank] != job.inputs[rank][0].data);
  }
}

TEST(ArraysThatMove) {
  Reset();
  Xla xla;
  Job job(&xla, With(AllReduce(3, "two_shot"), {{"timeout_s", 0.2}}));
  EXPECT(!job.Instantiate());
  EXPECT(fake::AllWell(job.Run()));
  const int exchanges = job.group()->num_exchanges(0);
  EXPECT(fake::AllWell(job.Run()));
  EXPECT_EQ(job.group()->num_exchanges(0), exchanges);
  // On all ranks alike: it takes an exchange.
  for (int device = 0; device < 3; ++device) xla.moves_windows[device] = 4096;
  EXPECT(fake::AllWell(job.Run()));
  EXPECT_EQ(job.group()->num_exchanges(0), exchanges + 1);
  EXPECT(fake::AllWell(job.Run()));
  EXPECT_EQ(job.group()->num_exchanges(0), exchanges + 1);
  fake::TakeLaunched();
  // On all ranks, and not alike.
  for (int device = 0; device < 3; ++device) xla.moves_windows[device] = 4096 << device;
  xla.moves_windows[0] = 512;
  EXPECT(fake::AllSay(job.Run(), "rank 1's arrays lie elsewhere in XLA's windows than rank 0's"));
  EXPECT(fake::TakeLaunched().empty());
  // Back again: nothing has changed since they were compared.
  for (int device = 0; device < 3; ++device) xla.moves_windows[device] = 4096;
  EXPECT(fake::AllWell(job.Run()));
  fake::TakeLaunched();
  // On one rank alone: it does not launch, whatever the others do.
  xla.moves_windows[2] = 512;
  const auto errors = job.RunOn({0, 1, 2});
  EXPECT(Says(errors[2].value_or("ok"), "was not over after 0.2 s"));
  EXPECT_EQ(fake::TakeLaunched().size(), 2);
}

// XLA lets whoever asked for windows wait for those who did not. They fail by their deadline.
TEST(OneRankAsksForNoWindows) {
  Reset();
  Xla xla;
  xla.registration_s = 0.4;
  xla.refuses_windows[1] = "not in collective memory";
  Job job(&xla, With(AllReduce(3, "two_shot"), {{"timeout_s", 0.1}}));
  EXPECT(!job.Instantiate());
  EXPECT(fake::AllWell(job.Stage(kPrepare)));
  const auto errors = job.Stage(kInitialize);
  EXPECT(Says(errors[0].value_or("ok"), "stuck in the registration of windows"));
  EXPECT(Says(errors[1].value_or("ok"), "was not over after 0.1 s"));
  EXPECT(Says(errors[1].value_or("ok"),
              "This rank asked XLA for no windows (jcoll: XLA says: not in collective memory)"));
}

// Where a rank never has windows, and all know it, nobody asks for any.
TEST(WindowsThatSomeRankNeverHas) {
  Reset();
  Xla xla;
  xla.make_group = [](fake::Group* group) {
    group->spoil = [](int rank, std::string* part) {
      // Of a barrier's announcement: misses_windows, for_good.
      uint32_t topic = 0;
      std::memcpy(&topic, part->data() + 4, sizeof(topic));
      if (rank != 1 || topic != 3) return;
      const int32_t yes[] = {1, 1};
      std::memcpy(part->data() + 8 + 24, yes, sizeof(yes));
      std::strcpy(part->data() + 8 + 32, "too old");
    };
  };
  Job barrier(&xla, With(AllReduce(2), {{"op", "barrier"}, {"reduce_op", ""}}));
  EXPECT(!barrier.Instantiate());
  EXPECT(fake::AllWell(barrier.Run()));
  Job job(&xla, With(barrier.attributes, {{"op", "all_reduce"}, {"reduce_op", "sum"}}));
  EXPECT(!job.Instantiate());
  EXPECT(fake::AllWell(job.Run()));
  EXPECT_EQ(xla.num_window_requests(), 0);
  EXPECT(fake::Has(fake::TakeLog(), "copies of the arrays: too old"));
}
