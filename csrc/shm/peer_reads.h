// Reading another process's memory where it lies: one copy, done by the kernel (process_vm_readv),
// where staging takes two. For all but small blocks that is the cheaper way: on an EPYC, 256 KiB
// both ways between two processes took 11 us against 28 us, 16 MiB 1.2 ms against 2.5 ms.
//
// The kernel allows it to whom it allows to attach as a debugger: the same user, and on systems
// with Yama (`kernel.yama.ptrace_scope` 1, Ubuntu's default) only ancestors. Where it does not,
// ranks stage.
#pragma once

#include <cstdint>

namespace jcoll {

// A word that every process keeps at its own address, for others to try whether they can read it.
struct ReadProbe {
  static constexpr uint64_t kValue = 0x4a434f4c4c524541;  // "JCOLLREA"
  static const uint64_t* address();
  // Whether this process may read that one's memory.
  static bool Try(int pid, const uint64_t* address);
};

// Copies all bytes; if not, returns false with errno set: ESRCH if the process is gone.
bool ReadPeer(int pid, const void* from, void* to, int64_t nbytes);

}  // namespace jcoll
