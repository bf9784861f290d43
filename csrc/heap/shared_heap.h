// Memory for XLA's buffers that other processes of the host can read where it lies: libjcoll_heap,
// which is preloaded (preload.cc), gives it out in place of the C library.
//
// It is one range of addresses, backed by a file without a name (memfd): an address in it is a
// place in that file, which peers map. A peer's result is then an operand like any other: one copy,
// or none where it is reduced, no system call, and no permission to attach as a debugger, which
// process_vm_readv asks for. Intel MPI and XPMEM-based MPIs share heaps for the same reason.
//
// Pages that have been given back by XLA are kept for the next buffer, up to kSlack more than what
// is in use. What is known of blocks is kept outside of them.
//
// A fork: the child sees the memory as its own from then on; buffers that the parent has not
// changed since look as they did, and nothing that the child writes reaches the parent. It gets no
// more of it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>

#include "block_map.h"
#include "heap_range.h"

namespace jcoll {

class SharedHeap {
 public:
  static constexpr int64_t kPageNbytes = 4096;
  static constexpr int64_t kSlack = int64_t{256} << 20;

  static SharedHeap& Get();
  // Whether an address is in the heap; before Get, too.
  static bool Has(const void* p) {
    const uintptr_t base = base_.load(std::memory_order_relaxed);
    return base != 0 && reinterpret_cast<uintptr_t>(p) - base <
                            static_cast<uintptr_t>(nbytes_.load(std::memory_order_relaxed));
  }

  // A block that begins on a page; null if there is no more.
  void* Allocate(size_t nbytes);
  void Free(void* p);
  size_t NbytesOf(void* p);
  // Null if the system gives no such memory.
  const HeapRange* range() const { return range_ ? &*range_ : nullptr; }

  // ForkSafe
  std::mutex mu;
  void ForgetParent();

  SharedHeap();

 private:
  char* base() const { return static_cast<char*>(range_->base); }
  int64_t OffsetOf(const void* p) const { return static_cast<const char*>(p) - base(); }

  static std::atomic<uintptr_t> base_;
  static std::atomic<int64_t> nbytes_;
  std::optional<HeapRange> range_;
  std::optional<BlockMap> blocks_;
  bool is_child_ = false;
};

}  // namespace jcoll
