// Two waiting threads on one core, as two processes' threads; a slot a core, as in the segment.
#include "csrc/shm/core_sharing.h"

#include <sched.h>

#include <atomic>
#include <cstdio>
#include <memory>
#include <thread>

#include "tests/native/check.h"

namespace {

using jcoll::CoreSharing;
using jcoll::MovePauses;

constexpr int64_t kMs = 1000000;

cpu_set_t Allowed() {
  cpu_set_t set;
  sched_getaffinity(0, sizeof(set), &set);
  return set;
}

void Allow(const cpu_set_t& set) { sched_setaffinity(0, sizeof(set), &set); }

cpu_set_t Only(int core) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  return set;
}

int FirstOf(const cpu_set_t& set) {
  int core = 0;
  while (!CPU_ISSET(core, &set)) ++core;
  return core;
}

std::unique_ptr<CoreSharing::Slot[]> NewSlots() {
  return std::make_unique<CoreSharing::Slot[]>(CoreSharing::kMaxCores);
}

// Has process `fixed` wait on the first core for good, begins to wait there as `self`, and returns
// how often it had met the other there when it was elsewhere; -1: it stayed.
int MeetingsUntilLeft(int self, int fixed, bool may_leave, int most) {
  auto slots = NewSlots();
  const cpu_set_t all = Allowed();
  const int core = FirstOf(all);
  std::atomic<bool> is_over{false};
  std::atomic<int64_t> turns{0};
  std::thread other([&] {
    Allow(Only(core));
    CoreSharing sharing(slots.get(), fixed, may_leave);
    for (; !is_over; ++turns) sharing.Yield();
  });
  Allow(Only(core));
  while (turns == 0) sched_yield();
  CoreSharing sharing(slots.get(), self, may_leave);
  int meetings = 0;
  while (meetings < most) {
    Allow(Only(core));
    Allow(all);  // It is still there, unless the kernel has been quick.
    const int64_t before = turns;
    sharing.Yield();
    meetings += turns > before;
    if (sched_getcpu() != core && turns > before) break;
  }
  const bool has_left = sched_getcpu() != core;
  is_over = true;
  other.join();
  const cpu_set_t now = Allowed();
  EXPECT_EQ(CPU_EQUAL(&now, &all), true);
  return has_left ? meetings : -1;
}

bool HasSeveralCores() {
  const cpu_set_t all = Allowed();
  if (CPU_COUNT(&all) > 1) return true;
  std::printf("skipped: one core only\n");
  return false;
}

}  // namespace

TEST(TheHigherOfTwoLeavesAtOnce) {
  if (!HasSeveralCores()) return;
  const int meetings = MeetingsUntilLeft(/*self=*/1, /*fixed=*/0, /*may_leave=*/true, 50);
  EXPECT_EQ(meetings > 0, true);
}

// The kernel may move a thread, too, but not at most of so many meetings.
TEST(TheLowerStays) {
  if (!HasSeveralCores()) return;
  int stayed = 0;
  for (int i = 0; i < 20; ++i) stayed += MeetingsUntilLeft(0, 1, true, 1) < 0;
  EXPECT_EQ(stayed >= 15, true);
}

TEST(WithoutCoresEnoughNobodyLeaves) {
  if (!HasSeveralCores()) return;
  int stayed = 0;
  for (int i = 0; i < 20; ++i) stayed += MeetingsUntilLeft(1, 0, false, 1) < 0;
  EXPECT_EQ(stayed >= 15, true);
}

TEST(AProcessThatMovesInVainMovesEverLess) {
  MovePauses pauses;
  int64_t now = 1000 * kMs;
  int moves = 0;
  // Asked every 10 us for 10 s, it moves after pauses that double, and then every 102 ms.
  for (int i = 0; i < 1000000; ++i, now += kMs / 100) moves += pauses.Next(now);
  EXPECT_EQ(moves > 90 && moves < 120, true);
  now += 1000 * kMs;  // Peace: all is forgotten.
  EXPECT_EQ(pauses.Next(now), true);
  EXPECT_EQ(pauses.Next(now + kMs / 10), false);
  EXPECT_EQ(pauses.Next(now + kMs / 4), true);
}

TEST(CoresWhereSomebodyWaitsAreNotFree) {
  auto slots = NewSlots();
  CoreSharing sharing(slots.get(), 1, true);
  const int64_t now = 5000 * kMs;
  cpu_set_t all;
  CPU_ZERO(&all);
  for (int core = 0; core < 6; ++core) CPU_SET(core, &all);
  sharing.WaitOn(1, now - kMs / 2);
  sharing.WaitOn(2, now + kMs);  // After the clock was read.
  sharing.WaitOn(3, now - 100 * kMs);
  const cpu_set_t others = sharing.Others(all, 0, now);
  const bool is_free[] = {false, false, false, true, true, true};
  for (int core = 0; core < 6; ++core) EXPECT_EQ(CPU_ISSET(core, &others) != 0, is_free[core]);
  for (int core = 3; core < 6; ++core) sharing.WaitOn(core, now);
  const cpu_set_t busy = sharing.Others(all, 0, now);
  EXPECT_EQ(CPU_COUNT(&busy), 5);
  const cpu_set_t alone = Only(0);
  const cpu_set_t none = sharing.Others(alone, 0, now);
  EXPECT_EQ(CPU_COUNT(&none), 0);
}
