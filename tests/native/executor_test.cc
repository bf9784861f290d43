// The pool alone, and under programs as XLA runs them: continuations that block, that go on for
// ever, that begin new collectives.
#include "csrc/executor.h"

#include <pthread.h>

#include <memory>
#include <set>

#include "csrc/site.h"
#include "tests/native/ranks.h"

namespace {

using jcoll::Executor;
using jcoll::Failure;
using jcoll::RankBuffers;
using jcoll::Runnable;
using jcoll::Site;
using jcoll::Task;
using ranks::AllReduce;
using ranks::Latch;
using ranks::OnThreads;
using ranks::Watchdog;
using Wake = Executor::Wake;

class Call : public Runnable {
 public:
  explicit Call(std::function<void(int)> fn) : fn_(std::move(fn)) {}
  void Run(int index) override { fn_(index); }

 private:
  std::function<void(int)> fn_;
};

void Push(int count, Wake wake, std::function<void(int)> fn) {
  auto call = std::make_shared<Call>(std::move(fn));
  std::vector<Task> tasks;
  for (int i = 0; i < count; ++i) tasks.push_back({call, i});
  Executor::Get().Push(std::move(tasks), wake);
}

// As lax's in-process collectives do it: a thread per rank, until all are there.
class BlockingCollective {
 public:
  explicit BlockingCollective(int num_ranks) : num_ranks_(num_ranks) {}
  void Wait() {
    std::unique_lock<std::mutex> lock(mu_);
    const int64_t mine = arrived_++ / num_ranks_;
    cv_.notify_all();
    cv_.wait(lock, [&] { return arrived_ >= (mine + 1) * num_ranks_; });
  }

 private:
  const int64_t num_ranks_;
  std::mutex mu_;
  std::condition_variable cv_;
  int64_t arrived_ = 0;
};

// `num_ranks` copies of a program: `num_steps` times { all_reduce of one number; `between` }.
class Loop {
 public:
  Loop(int num_ranks, int num_steps, std::function<void(int rank, int step)> between)
      : site_(AllReduce(num_ranks, 1, "executor_test.cc:1")),
        num_ranks_(num_ranks),
        num_steps_(num_steps),
        between_(std::move(between)),
        in_(num_ranks),
        out_(num_ranks),
        left_(num_ranks) {}
  void Begin(int rank) { Step(rank, 0); }
  void Wait() { left_.Wait(); }
  void Run() {
    OnThreads(num_ranks_, [this](int rank) { Begin(rank); });
    Wait();
  }

 private:
  void Step(int rank, int step) {
    for (; step < num_steps_; ++step) {
      in_[rank] = step + rank;
      RankBuffers b;
      b.inputs[0] = &in_[rank];
      b.outputs[0] = &out_[rank];
      const auto rest = [=] {
        Finish(rank, step);
        Step(rank, step + 1);
      };
      if (!ranks::ArriveOrThen(&site_, /*run_id=*/1, rank, b, rest)) return;
      Finish(rank, step);
    }
    left_.CountDown();
  }
  void Finish(int rank, int step) {
    EXPECT_EQ(out_[rank], num_ranks_ * step + num_ranks_ * (num_ranks_ - 1) / 2);
    between_(rank, step);
  }
  Site site_;
  const int num_ranks_, num_steps_;
  const std::function<void(int, int)> between_;
  std::vector<int> in_, out_;
  Latch left_;
};

// The first case: later ones leave spare threads behind.
TEST(LargeCollectivesKeepWithinTheCores) {
  Watchdog watchdog;
  Executor::SetNumThreads(2);
  constexpr int kCount = 100000, kThreads = 12;
  const std::vector<int> in(kCount, 1);
  OnThreads(kThreads, [&](int) {
    Site site(AllReduce(1, kCount, "executor_test.cc:5"));
    std::vector<int> out(kCount);
    for (int run = 0; run < 20; ++run) {
      ranks::Outcome outcome(1);
      RankBuffers b;
      b.inputs[0] = in.data();
      b.outputs[0] = out.data();
      site.Arrive(run, 0, b, outcome.Of(0));
      outcome.ExpectSuccess();
    }
    EXPECT(out == in);
  });
  EXPECT(Executor::Get().num_alive() <= 2 || Executor::Get().num_stalls() > 0);
  Executor::SetNumThreads(0);
}

// What looks like a stall at every tick, but moves.
TEST(ALongQueueIsNoRunaway) {
  Watchdog watchdog;
  Executor::SetNumThreads(2);
  constexpr int kTasks = 600;
  for (Wake wake : {Wake::kCores, Wake::kAll}) {
    Latch left(kTasks);
    Push(kTasks, wake, [&](int index) {  // Which do not end all at once.
      std::this_thread::sleep_for(std::chrono::microseconds(1500 + 700 * (index % 5)));
      left.CountDown();
    });
    left.Wait();
    EXPECT(Executor::Get().num_alive() < kTasks / 2);
  }
  Executor::SetNumThreads(0);
}

TEST(EveryTaskRunsOnce) {
  Watchdog watchdog;
  constexpr int kPushes = 300, kTasks = 7;
  for (Wake wake : {Wake::kLazy, Wake::kCores, Wake::kHelpers, Wake::kAll}) {
    std::vector<std::atomic<int>> runs(3 * kPushes * kTasks);
    Latch left(3 * kPushes * kTasks);
    OnThreads(3, [&](int thread) {
      for (int i = 0; i < kPushes; ++i) {
        const int first = (thread * kPushes + i) * kTasks;
        Push(kTasks, wake, [&, first](int index) {
          ++runs[first + index];
          left.CountDown();
        });
      }
    });
    left.Wait();
    for (auto& n : runs) EXPECT_EQ(n.load(), 1);
  }
}

// Workers that have run out of long tasks look for more before they sleep: pushes in all of that
// time, of either kind, find somebody, without the monitor's help.
TEST(TasksThatComeSoonAfter) {
  Watchdog watchdog;
  constexpr int kRounds = 3000, kTasks = 3;
  const int64_t stalls = Executor::Get().num_stalls();
  std::atomic<int> runs{0};
  for (int round = 0; round < kRounds; ++round) {
    Push(kTasks, round % 4 == 3 ? Wake::kLazy : Wake::kCores, [&](int) { ++runs; });
    while (runs.load() < (round + 1) * kTasks) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::microseconds(round % 60));
  }
  EXPECT(Executor::Get().num_stalls() - stalls < kRounds / 10);
}

TEST(NothingToPush) { Executor::Get().Push({}, Wake::kAll); }

// Each task waits for all the others: they need a thread each, whatever the number of cores.
TEST(TasksThatWaitForEachOther) {
  Watchdog watchdog;
  const int64_t stalls = Executor::Get().num_stalls();
  for (Wake wake : {Wake::kLazy, Wake::kCores, Wake::kHelpers, Wake::kAll}) {
    constexpr int kTasks = 40;
    BlockingCollective meeting(kTasks);
    Latch left(kTasks);
    Push(kTasks, wake, [&](int) {
      meeting.Wait();
      left.CountDown();
    });
    left.Wait();
  }
  EXPECT(Executor::Get().num_stalls() > stalls);
  EXPECT(Executor::Get().num_alive() >= 40);
}

// A loop of small collectives on 8 ranks; 100,000 of them would need 20 MiB of stack if each began
// inside its predecessor.
TEST(LongChains) {
  Watchdog watchdog;
  Loop loop(8, 100000, [](int, int) {});
  loop.Run();
}

// What a program is that mixes lax's collectives and ours: jcoll, lax, jcoll, lax, ...
TEST(ContinuationsThatBlock) {
  Watchdog watchdog;
  BlockingCollective lax(8);
  Loop loop(8, 2000, [&](int, int) { lax.Wait(); });
  loop.Run();
}

TEST(ContinuationsThatBlockNowAndThen) {
  Watchdog watchdog;
  BlockingCollective lax(6);
  Loop loop(6, 3000, [&](int, int step) {
    if (step % 97 >= 95) lax.Wait();
    if (step % 500 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(3));
  });
  loop.Run();
}

TEST(OneThreadIsEnoughToStartWith) {
  Watchdog watchdog;
  Executor::SetNumThreads(1);
  EXPECT_EQ(Executor::NumThreads(), 1);
  BlockingCollective lax(5), later(5);
  Loop loop(5, 300, [&](int, int step) {
    lax.Wait();
    if (step % 2) later.Wait();
  });
  loop.Run();
  Executor::SetNumThreads(0);
}

// Two programs at once, each of which blocks between its steps.
TEST(TwoProgramsInFlight) {
  Watchdog watchdog;
  BlockingCollective lax_a(4), lax_b(4);
  Loop a(4, 500, [&](int, int) { lax_a.Wait(); });
  Loop b(4, 500, [&](int, int step) {
    if (step % 3 == 0) lax_b.Wait();
  });
  OnThreads(8, [&](int i) { (i < 4 ? a : b).Begin(i % 4); });
  a.Wait();
  b.Wait();
}

// Rank by rank, the program goes on after the first collective only if the second has completed
// everywhere. All are begun at once, as XLA does with what does not depend on each other.
TEST(FirstStageWaitsForTheSecond) {
  Watchdog watchdog;
  constexpr int kRanks = 8;
  for (int run = 0; run < 50; ++run) {
    Site first(AllReduce(kRanks, 1, "executor_test.cc:2"));
    Site second(AllReduce(kRanks, 1, "executor_test.cc:3"));
    Latch second_begun(kRanks), left(kRanks);
    std::vector<int> in(kRanks, 1), out(2 * kRanks, 0);
    OnThreads(kRanks, [&](int rank) {
      RankBuffers b;
      b.inputs[0] = &in[rank];
      b.outputs[0] = &out[rank];
      const auto rest = [&] {
        second_begun.Wait();
        left.CountDown();
      };
      // What the last rank does next is not waited for by what it has yet to begin.
      const bool is_last = ranks::ArriveOrThen(&first, run, rank, b, rest);
      b.outputs[0] = &out[kRanks + rank];
      second.Arrive(run, rank, b, [&](const Failure*) { second_begun.CountDown(); });
      if (is_last) rest();
    });
    left.Wait();
    EXPECT(out == std::vector<int>(2 * kRanks, kRanks));
  }
}

// Large collectives need helpers while all workers are blocked; whoever starts one does it alone.
TEST(LargeCollectivesWhileWorkersAreBlocked) {
  Watchdog watchdog;
  Latch release(1), blocked(Executor::NumThreads()), left(Executor::NumThreads());
  Push(Executor::NumThreads(), Wake::kAll, [&](int) {
    blocked.CountDown();
    release.Wait();
    left.CountDown();
  });
  blocked.Wait();
  constexpr int kCount = 300000;
  Site site(AllReduce(2, kCount, "executor_test.cc:4"));
  const std::vector<int> in(kCount, 21);
  std::vector<int> out[2] = {std::vector<int>(kCount), std::vector<int>(kCount)};
  ranks::Outcome outcome(2);
  for (int rank : {0, 1}) {
    RankBuffers b;
    b.inputs[0] = in.data();
    b.outputs[0] = out[rank].data();
    site.Arrive(1, rank, b, outcome.Of(rank));
  }
  outcome.ExpectSuccess();
  for (int rank : {0, 1}) EXPECT(out[rank] == std::vector<int>(kCount, 42));
  release.CountDown();
  left.Wait();
}

}  // namespace
