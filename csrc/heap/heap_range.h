// Where a process's shared heap is: what libjcoll_heap tells jcoll._native.
#pragma once

#include <cstdint>

namespace jcoll {

struct HeapRange {
  void* base;
  int64_t nbytes;
  int fd;                  // Of the file behind it, whose byte 0 is at `base`,
  uint64_t device, inode;  // and which this is: a descriptor's number may be another's by now.
};

}  // namespace jcoll

// Null if there is none. To be looked up (dlsym): a process need not have the library.
extern "C" const jcoll::HeapRange* jcoll_shared_heap();
