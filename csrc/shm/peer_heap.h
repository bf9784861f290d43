// The shared heaps of processes (csrc/heap), as their peers see them.
#pragma once

#include <cstdint>
#include <utility>

#include "../heap/heap_range.h"

namespace jcoll {

// Where a process has its heap: what it tells the others.
struct HeapPlace {
  uint64_t base = 0;
  int64_t nbytes = 0;  // 0: it has none.
  int32_t fd = -1;
  uint64_t device = 0, inode = 0;

  static HeapPlace Of(const HeapRange* heap);
  bool Has(const void* p) const {
    return reinterpret_cast<uint64_t>(p) - base < static_cast<uint64_t>(nbytes);
  }
};

// Another process's heap, mapped to be read. A process that has died leaves it readable.
class PeerHeap {
 public:
  PeerHeap() = default;
  PeerHeap(PeerHeap&& other) noexcept
      : place_(other.place_), data_(std::exchange(other.data_, nullptr)) {}
  ~PeerHeap();

  // Returns whether all is well: the heap is mapped, or there is none.
  bool Map(int pid, const HeapPlace& place);
  const char* At(const char* address) const {
    return data_ + (reinterpret_cast<uint64_t>(address) - place_.base);
  }

 private:
  HeapPlace place_;
  const char* data_ = nullptr;
};

}  // namespace jcoll
