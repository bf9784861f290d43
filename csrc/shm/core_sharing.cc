#include "core_sharing.h"

#include <algorithm>

#include "world.h"

namespace jcoll {
namespace {

constexpr int64_t kMinPauseNs = 200000;
constexpr int64_t kMaxPauseNs = 512 * kMinPauseNs;
constexpr int64_t kPeaceNs = 4000000;
// A core where somebody has waited so recently is not free.
constexpr int64_t kRecentUs = 1000;

constexpr int kTimeBits = 48;

uint64_t Word(int process, int64_t now_ns) {
  const uint64_t us = static_cast<uint64_t>(now_ns / 1000) << (64 - kTimeBits);
  return static_cast<uint64_t>(process) << kTimeBits | us >> (64 - kTimeBits);
}
int ProcessOf(uint64_t word) { return static_cast<int>(word >> kTimeBits); }
// Since the word was written; less than 0 if that was after `now_ns` had been read.
int64_t AgeUs(uint64_t word, int64_t now_ns) {
  return static_cast<int64_t>((Word(0, now_ns) - word) << (64 - kTimeBits)) >> (64 - kTimeBits);
}

}  // namespace

bool MovePauses::Next(int64_t now_ns) {
  int64_t last_ns = last_ns_.load(std::memory_order_relaxed);
  const int64_t pause_ns = pause_ns_.load(std::memory_order_relaxed);
  const int64_t since_ns = now_ns - last_ns;
  if (since_ns < pause_ns || !last_ns_.compare_exchange_strong(last_ns, now_ns)) return false;
  const bool had_peace = since_ns > pause_ns + kPeaceNs;
  pause_ns_.store(had_peace ? kMinPauseNs : std::clamp(2 * pause_ns, kMinPauseNs, kMaxPauseNs),
                  std::memory_order_relaxed);
  return true;
}

void CoreSharing::Yield() {
  const int core = may_leave_ ? sched_getcpu() : -1;
  if (core < 0 || core >= kMaxCores) {
    sched_yield();
    return;
  }
  WaitOn(core, MonotonicNs());
  sched_yield();
  const int other = ProcessOf(slots_[core].last.load(std::memory_order_relaxed));
  if (other < self_ && sched_getcpu() == core) Leave(core);
}

void CoreSharing::WaitOn(int core, int64_t now_ns) {
  slots_[core].last.store(Word(self_, now_ns), std::memory_order_relaxed);
}

cpu_set_t CoreSharing::Others(const cpu_set_t& all, int core, int64_t now_ns) const {
  cpu_set_t others = all;
  CPU_CLR(core, &others);
  cpu_set_t free = others;
  for (int i = 0; i < std::min(kMaxCores, CPU_SETSIZE); ++i) {
    const uint64_t last = slots_[i].last.load(std::memory_order_relaxed);
    if (last != 0 && AgeUs(last, now_ns) < kRecentUs) CPU_CLR(i, &free);
  }
  return CPU_COUNT(&free) > 0 ? free : others;
}

// The kernel moves the thread when its core is taken from its set, and leaves it where it is when
// the core is given back; unless somebody else has given it another set meanwhile. (What stays:
// Linux takes the set for one that the thread has asked for, so that cores that the process is
// given later are not added to it.)
void CoreSharing::Leave(int core) {
  const int64_t now_ns = MonotonicNs();
  cpu_set_t all;
  if (!pauses_.Next(now_ns) || sched_getaffinity(0, sizeof(all), &all) != 0) return;
  const cpu_set_t others = Others(all, core, now_ns);
  if (CPU_COUNT(&others) == 0 || sched_setaffinity(0, sizeof(others), &others) != 0) return;
  cpu_set_t now;
  if (sched_getaffinity(0, sizeof(now), &now) == 0 && !CPU_EQUAL(&now, &others)) return;
  sched_setaffinity(0, sizeof(all), &all);
}

}  // namespace jcoll
