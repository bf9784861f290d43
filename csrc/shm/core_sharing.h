// Threads of several processes that wait for each other on one core while others are idle: a switch
// between them is part of every step then, 3 to 5 times what a small collective takes, and as none
// of them runs for long, the kernel sees no load to spread and may leave them there for seconds.
// (XLA's gloo brings them together: a thread that wakes another up over a socket draws it to its
// own core.)
//
// A thread that waits writes its process into the slot of its core and yields. If another process
// has written there when it runs again, the two share the core, and that of the higher number goes.
#pragma once

#include <sched.h>

#include <atomic>
#include <cstdint>

namespace jcoll {

// When a process may move a thread again: one move costs some 20 us, and where all cores are in use
// by others it is in vain. Twice as long each time, until there has been peace for 4 ms more.
class MovePauses {
 public:
  // Whether now; the next pause begins then.
  bool Next(int64_t now_ns);

 private:
  std::atomic<int64_t> last_ns_{0}, pause_ns_{0};
};

class CoreSharing {
 public:
  static constexpr int kMaxCores = 1024;
  struct alignas(64) Slot {
    std::atomic<uint64_t> last;  // Who has waited here last, and when: process << 48 | us.
  };

  // `slots`: one a core, in memory that all processes of the host map. `may_leave`: there are cores
  // enough.
  CoreSharing(Slot* slots, int self, bool may_leave)
      : slots_(slots), self_(self), may_leave_(may_leave) {}
  // Lets other threads of this core run, and goes to another core if they are peers'.
  void Yield();
  // Says that this process waits on a core.
  void WaitOn(int core, int64_t now_ns);
  // Of `all` but `core`, those where nobody has waited just now; if none is left, all but `core`.
  cpu_set_t Others(const cpu_set_t& all, int core, int64_t now_ns) const;

 private:
  void Leave(int core);

  Slot* const slots_;
  const int self_;
  const bool may_leave_;
  MovePauses pauses_;
};

}  // namespace jcoll
