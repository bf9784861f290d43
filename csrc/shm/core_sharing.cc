#include "core_sharing.h"

#include <sched.h>

#include <algorithm>

namespace jcoll {
namespace {

// Between two moves of a process: one costs some 20 us, and where all cores are in use by others
// it is in vain. Twice as long each time, unless the last was long ago.
constexpr int64_t kMinPauseNs = 200000;
constexpr int64_t kMaxPauseNs = 512 * kMinPauseNs;
constexpr int64_t kLongAgoNs = 4000000;
// A core where somebody has waited so recently is not free.
constexpr int64_t kRecentUs = 1000;

constexpr int kTimeBits = 48;
constexpr uint64_t kTimeMask = (uint64_t{1} << kTimeBits) - 1;

uint64_t Word(int process, int64_t now_ns) {
  return static_cast<uint64_t>(process) << kTimeBits |
         (static_cast<uint64_t>(now_ns / 1000) & kTimeMask);
}
int ProcessOf(uint64_t word) { return static_cast<int>(word >> kTimeBits); }

}  // namespace

void CoreSharing::Yield(int64_t now_ns) {
  const int core = may_leave_ ? sched_getcpu() : -1;
  if (core < 0 || core >= kMaxCores) {
    sched_yield();
    return;
  }
  slots_[core].last.store(Word(self_, now_ns), std::memory_order_relaxed);
  sched_yield();
  const int other = ProcessOf(slots_[core].last.load(std::memory_order_relaxed));
  if (other < self_ && sched_getcpu() == core) Leave(core, now_ns);
}

// The thread's set of cores is the same afterwards: the kernel moves it when its core is taken from
// the set, and leaves it where it is when it is given back.
void CoreSharing::Leave(int core, int64_t now_ns) {
  int64_t left_ns = left_ns_.load(std::memory_order_relaxed);
  const int64_t pause_ns = pause_ns_.load(std::memory_order_relaxed);
  if (now_ns - left_ns < pause_ns || !left_ns_.compare_exchange_strong(left_ns, now_ns)) return;
  pause_ns_.store(now_ns - left_ns > kLongAgoNs ? kMinPauseNs : std::min(2 * pause_ns, kMaxPauseNs),
                  std::memory_order_relaxed);
  cpu_set_t all, others, free;
  if (sched_getaffinity(0, sizeof(all), &all) != 0) return;
  others = all;
  CPU_CLR(core, &others);
  free = others;
  for (int i = 0; i < std::min(kMaxCores, CPU_SETSIZE); ++i) {
    const uint64_t last = slots_[i].last.load(std::memory_order_relaxed);
    const int64_t us = static_cast<int64_t>((Word(0, now_ns) - last) & kTimeMask);
    if (last != 0 && us < kRecentUs) CPU_CLR(i, &free);
  }
  if (CPU_COUNT(&others) == 0) return;
  const cpu_set_t& target = CPU_COUNT(&free) > 0 ? free : others;
  if (sched_setaffinity(0, sizeof(target), &target) == 0) {
    sched_setaffinity(0, sizeof(all), &all);
  }
}

}  // namespace jcoll
