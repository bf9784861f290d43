#include "shared_heap.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>

#include "../align.h"
#include "../fork_safe.h"

namespace jcoll {
namespace {

// Addresses, not memory. Every peer maps as much, and there may be hundreds.
constexpr int64_t kMostNbytes = int64_t{256} << 30;

int64_t PhysicalNbytes() {
  return std::max<int64_t>(0, int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE));
}

// Of a file. A larger one would not only fail, but bring a signal (SIGXFSZ).
int64_t LargestFile() {
  rlimit limit;
  const bool is_limited =
      getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur < static_cast<rlim_t>(kMostNbytes);
  return is_limited ? static_cast<int64_t>(limit.rlim_cur) : kMostNbytes;
}

std::optional<HeapRange> MakeRange() {
  const int64_t nbytes =
      std::min(PhysicalNbytes(), LargestFile()) / SharedHeap::kPageNbytes * SharedHeap::kPageNbytes;
  const int fd = memfd_create("jcoll-heap", MFD_CLOEXEC);
  if (fd < 0) return std::nullopt;
  void* base = MAP_FAILED;
  if (nbytes > 0 && ftruncate(fd, nbytes) == 0) {
    base = mmap(nullptr, static_cast<size_t>(nbytes), PROT_READ | PROT_WRITE,
                MAP_SHARED | MAP_NORESERVE, fd, 0);
  }
  if (base == MAP_FAILED) {
    close(fd);
    return std::nullopt;
  }
  // Where the system has huge pages for such files (shmem_enabled).
  madvise(base, static_cast<size_t>(nbytes), MADV_HUGEPAGE);
  return HeapRange{base, nbytes, fd};
}

}  // namespace

std::atomic<uintptr_t> SharedHeap::base_{0};
std::atomic<int64_t> SharedHeap::nbytes_{0};

SharedHeap& SharedHeap::Get() { return ForkSafe<SharedHeap>(); }

SharedHeap::SharedHeap() : range_(MakeRange()) {
  if (!range_) return;
  blocks_.emplace(range_->nbytes);
  nbytes_.store(range_->nbytes);
  base_.store(reinterpret_cast<uintptr_t>(range_->base));
}

void* SharedHeap::Allocate(size_t nbytes) {
  if (!range_ || nbytes > static_cast<size_t>(range_->nbytes)) return nullptr;
  std::lock_guard<std::mutex> lock(mu);
  if (is_child_) return nullptr;
  const int64_t offset = blocks_->Take(RoundUp(static_cast<int64_t>(nbytes), kPageNbytes));
  return offset < 0 ? nullptr : base() + offset;
}

void SharedHeap::Free(void* p) {
  std::lock_guard<std::mutex> lock(mu);
  if (is_child_) return;  // It is the parent's.
  const BlockMap::Range hole = blocks_->Give(OffsetOf(p));
  if (blocks_->kept() <= blocks_->used() + kSlack) return;
  if (madvise(base() + hole.offset, static_cast<size_t>(hole.nbytes), MADV_REMOVE) == 0) {
    blocks_->Empty(hole.offset);
  }
}

size_t SharedHeap::NbytesOf(void* p) {
  std::lock_guard<std::mutex> lock(mu);
  return static_cast<size_t>(blocks_->NbytesOf(OffsetOf(p)));
}

void SharedHeap::ForgetParent() {
  is_child_ = true;
  if (!range_) return;
  mmap(range_->base, static_cast<size_t>(range_->nbytes), PROT_READ | PROT_WRITE,
       MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, range_->fd, 0);
}

}  // namespace jcoll
