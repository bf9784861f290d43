// Memory for XLA's buffers that other processes of the host can read where it lies: libjcoll_heap,
// which is preloaded (preload.cc), gives it out in place of the C library.
//
// It is one range of addresses, backed by a file without a name (memfd): an address in it is a
// place in that file, which peers map. A peer's result is then an operand like any other: one copy,
// or none where it is reduced, no system call, and no permission to attach as a debugger, which
// process_vm_readv asks for. Intel MPI and XPMEM-based MPIs share heaps for the same reason.
//
// Pages that XLA has given back are kept for its next buffer: what is used and kept is at most
// kSlack more than what was used at a time, of late, so that a program which needs as much for each
// of its steps gets the pages of the last one. What is known of blocks is kept outside of them.
// Core dumps leave the memory out: to write it, the kernel would give pages to all of the range.
//
// A child of a fork has no access: it would see what its parent makes of the memory later, not what
// was there. It ends by SIGSEGV where it looks at one of XLA's buffers, which JAX does not bear in
// a child anyway.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>

#include "block_map.h"
#include "heap_range.h"

namespace jcoll {

class SharedHeap {
 public:
  static constexpr int64_t kSlack = int64_t{256} << 20;
  // "Of late": in this window or the one before.
  static constexpr std::chrono::seconds kWindow{2};
  static int64_t PageNbytes();

  static SharedHeap& Get();
  // Whether an address is in the heap; before Get, too.
  static bool Has(const void* p) {
    const uintptr_t base = base_.load(std::memory_order_relaxed);
    return base != 0 && reinterpret_cast<uintptr_t>(p) - base <
                            static_cast<uintptr_t>(nbytes_.load(std::memory_order_relaxed));
  }

  // A block that begins on a page; null if there is no more.
  void* Allocate(size_t nbytes);
  // Aborts if no block begins there, as the C library does.
  void Free(void* p);
  size_t NbytesOf(void* p);
  // Null if the system gives no such memory, and in a child of a fork.
  const HeapRange* range() const { return range_ && !is_child_ ? &*range_ : nullptr; }

  // ForkSafe
  std::mutex mu;
  void ForgetParent();

  SharedHeap();

 private:
  char* base() const { return static_cast<char*>(range_->base); }
  using Clock = std::chrono::steady_clock;
  void ReturnPages();
  int64_t Peak() const { return std::max(peak_, peak_before_); }
  int64_t OffsetOf(const void* p) const { return static_cast<const char*>(p) - base(); }

  static std::atomic<uintptr_t> base_;
  static std::atomic<int64_t> nbytes_;
  std::optional<HeapRange> range_;
  std::optional<BlockMap> blocks_;
  int64_t peak_ = 0, peak_before_ = 0;  // Of what is used, in this window and the one before.
  Clock::time_point window_began_ = Clock::now();
  bool is_child_ = false;
};

}  // namespace jcoll
