// The runtime across fork, without threads to be had, and at the end of the process.
#include <pthread.h>
#include <sys/wait.h>

#include <memory>

#include "csrc/site.h"
#include "tests/native/ranks.h"

namespace {
bool g_is_child = false;
}

// LeakSanitizer would take for leaks what only the parent's threads, gone in the child, pointed to.
extern "C" __attribute__((visibility("default"), no_sanitize("address"))) int
__lsan_is_turned_off() {
  return g_is_child ? 1 : 0;
}

namespace {

using jcoll::Executor;
using jcoll::RankBuffers;
using jcoll::Site;
using ranks::AllReduce;
using ranks::OnThreads;
using ranks::Sum;
using ranks::Watchdog;
using std::chrono::milliseconds;

// A collective of 4 ranks from beginning to end.
void SumOnce(Site* site, int64_t run_id) {
  Sum sum(4);
  OnThreads(4, [&](int rank) { sum.Arrive(site, run_id, rank, rank); });
  sum.Expect(6);
}

// Not under ThreadSanitizer: its runtime keeps the parent's threads in its books, and dies when the
// child is given a thread with the id of one of them ("dup thread with used id").
#ifndef __SANITIZE_THREAD__

// Runs fn in a child and returns its exit status; -1 if a signal ended it.
int InChild(const std::function<int()>& fn) {
  std::fflush(nullptr);
  const pid_t pid = fork();
  if (pid == 0) {
    g_is_child = true;
    check::failures = 0;
    Watchdog* watchdog = new Watchdog(std::chrono::seconds(60));  // Its like did not survive.
    const int status = fn();
    (void)watchdog;
    std::exit(check::failures == 0 ? status : 99);
  }
  int status = 0;
  EXPECT_EQ(waitpid(pid, &status, 0), pid);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST(ForkBeforeFirstUse) {
  Watchdog watchdog;
  EXPECT_EQ(InChild([] {
              Site site(AllReduce(4, 1, "process_test.cc:1"));
              SumOnce(&site, 1);
              return 7;
            }),
            7);
}

TEST(ForkAfterUse) {
  Watchdog watchdog;
  Site site(AllReduce(4, 1, "process_test.cc:2"));
  SumOnce(&site, 1);
  EXPECT_EQ(InChild([] { return 5; }), 5);
  EXPECT_EQ(InChild([] {
              Site fresh(AllReduce(4, 1, "process_test.cc:3"));
              for (int run = 0; run < 100; ++run) SumOnce(&fresh, run);
              return 6;
            }),
            6);
  SumOnce(&site, 2);
}

// The child neither waits for, nor completes, what the parent has open; its own deadlines work.
TEST(ForkWithCollectivesOpen) {
  Watchdog watchdog;
  jcoll::Description d = AllReduce(4, 1, "process_test.cc:4");
  d.timeout_s = 0.5;
  Site site(d);
  Sum open(4);
  open.Arrive(&site, 1, 0, 1);
  EXPECT_EQ(InChild([&] {
              jcoll::Description mine = AllReduce(4, 1, "process_test.cc:5");
              mine.timeout_s = 0.8;
              Site fresh(mine);
              SumOnce(&fresh, 1);
              Sum late(4);
              late.Arrive(&fresh, 2, 3, 1);
              EXPECT_CONTAINS(late.outcome.Error(3), "missing: 0-2");
              EXPECT_EQ(open.outcome.num_done(), 0);
              return 8;
            }),
            8);
  EXPECT_CONTAINS(open.outcome.Error(0), "missing: 1-3");
}

// Not under AddressSanitizer: GCC's does not hold its allocator's locks across a fork.
#ifndef __SANITIZE_ADDRESS__

// Forks while other threads use every lock of the runtime.
TEST(ForkInTheMiddleOfThings) {
  Watchdog watchdog;
  std::atomic<bool> stop{false};
  std::thread user([&] {
    for (int64_t run = 0; !stop; ++run) {
      Site site(AllReduce(4, 1, "process_test.cc:6"));
      for (int i = 0; i < 3; ++i) SumOnce(&site, run);
      jcoll::AllMetrics();
    }
  });
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(InChild([&] {
                Site fresh(AllReduce(4, 1, "process_test.cc:7"));
                SumOnce(&fresh, 1);
                return 9;
              }),
              9);
  }
  stop = true;
  user.join();
}

#endif  // __SANITIZE_ADDRESS__

// A machine that has no thread left: the work is done by who brings it.
TEST(NoThreadsToBeHad) {
  Watchdog watchdog;
  EXPECT_EQ(InChild([] {
              Site site(AllReduce(2, 1, "process_test.cc:8"));
              pthread_attr_t attr;
              pthread_attr_init(&attr);
              pthread_attr_setstacksize(&attr, size_t{1} << 46);
              if (pthread_setattr_default_np(&attr) != 0) return 1;
              for (int run = 0; run < 1000; ++run) {
                Sum sum(2);
                for (int rank : {0, 1}) sum.Arrive(&site, run, rank, 10 + rank);
                sum.Expect(21);
              }
              EXPECT_EQ(Executor::Get().num_alive(), 0);
              return 3;
            }),
            3);
}

// Two ranks that all_reduce without end.
class Endless {
 public:
  Endless() : site_(AllReduce(2, 1, "process_test.cc:9")) {
    for (int rank : {0, 1}) Step(rank);
  }

 private:
  void Step(int rank) {
    RankBuffers b;
    b.inputs[0] = &in_[rank];
    b.outputs[0] = &out_[rank];
    while (ranks::ArriveOrThen(&site_, 1, rank, b, [=] { Step(rank); })) {
    }
  }
  Site site_;
  int in_[2] = {1, 2}, out_[2] = {};
};

TEST(ExitWithWorkInFlight) {
  Watchdog watchdog;
  const auto start = std::chrono::steady_clock::now();
  EXPECT_EQ(InChild([] {
              new Endless();
              std::this_thread::sleep_for(milliseconds(20));
              return 4;
            }),
            4);
  EXPECT(std::chrono::steady_clock::now() - start < std::chrono::seconds(30));
}

TEST(ExitWithARankMissing) {
  Watchdog watchdog;
  const auto start = std::chrono::steady_clock::now();
  EXPECT_EQ(InChild([] {
              Site* site = new Site(AllReduce(2, 1, "process_test.cc:10"));
              (new Sum(2))->Arrive(site, 1, 0, 1);
              std::this_thread::sleep_for(milliseconds(30));
              return 4;
            }),
            4);
  EXPECT(std::chrono::steady_clock::now() - start < std::chrono::seconds(1));
}

#endif  // __SANITIZE_THREAD__

// Last, as there is no way back from it.
TEST(StopFinishesWhatIsQueuedAndServesWhatComesLater) {
  Watchdog watchdog;
  class Slow : public jcoll::Runnable {
   public:
    void Run(int) override {
      std::this_thread::sleep_for(milliseconds(2));
      ++runs;
    }
    std::atomic<int> runs{0};
  };
  auto slow = std::make_shared<Slow>();
  std::vector<jcoll::Task> tasks(50, {slow, 0});
  Executor::Get().Push(tasks, Executor::Wake::kLazy);
  Executor::Get().Stop();
  EXPECT_EQ(slow->runs.load(), 50);
  EXPECT_EQ(Executor::Get().num_alive(), 0);

  jcoll::Description d = AllReduce(4, 1, "process_test.cc:11");
  d.timeout_s = 0.03;
  Site site(d);
  for (int run = 0; run < 100; ++run) SumOnce(&site, run);
  Sum open(4);
  open.Arrive(&site, 1000, 1, 1);
  EXPECT_CONTAINS(open.outcome.Error(1), "missing: 0, 2, 3");
  Executor::Get().Stop();
  EXPECT_EQ(Executor::Get().num_alive(), 0);
}

}  // namespace
