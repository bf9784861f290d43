#include "shared_heap.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <string>

#include "../align.h"
#include "../fork_safe.h"

namespace jcoll {
namespace {

// Addresses, not memory. Every peer maps as much, and there may be hundreds.
constexpr int64_t kMostNbytes = int64_t{256} << 30;

// Four times what there is: blocks need room between each other.
int64_t WantedNbytes() {
  const int64_t pages = sysconf(_SC_PHYS_PAGES);
  return pages <= 0 ? 0 : std::min(kMostNbytes, 4 * pages * SharedHeap::PageNbytes());
}

// A file that is larger than allowed does not only fail, but brings a signal (SIGXFSZ); addresses
// that are counted are needed for other things.
bool HasRoom(int64_t nbytes) {
  rlimit file, addresses;
  return getrlimit(RLIMIT_FSIZE, &file) == 0 && file.rlim_cur >= static_cast<rlim_t>(nbytes) &&
         getrlimit(RLIMIT_AS, &addresses) == 0 && addresses.rlim_cur == RLIM_INFINITY;
}

std::optional<HeapRange> MakeRange() {
  const int64_t nbytes = WantedNbytes();
  if (nbytes == 0 || !HasRoom(nbytes)) return std::nullopt;
  const int fd = memfd_create("jcoll-heap", MFD_CLOEXEC);
  if (fd < 0) return std::nullopt;
  void* base = MAP_FAILED;
  struct stat s = {};
  if (ftruncate(fd, nbytes) == 0 && fstat(fd, &s) == 0) {
    base = mmap(nullptr, static_cast<size_t>(nbytes), PROT_READ | PROT_WRITE,
                MAP_SHARED | MAP_NORESERVE, fd, 0);
  }
  if (base == MAP_FAILED) {
    close(fd);
    return std::nullopt;
  }
  madvise(base, static_cast<size_t>(nbytes), MADV_DONTDUMP);
  // Where the system has huge pages for such files (shmem_enabled).
  madvise(base, static_cast<size_t>(nbytes), MADV_HUGEPAGE);
  return HeapRange{base, nbytes, fd, s.st_dev, s.st_ino};
}

[[noreturn]] void AbortOf(const char* what) {
  const std::string text = std::string("jcoll-heap: ") + what + ": no buffer begins there\n";
  if (write(STDERR_FILENO, text.data(), text.size()) < 0) std::abort();
  std::abort();
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

int64_t SharedHeap::PageNbytes() {
  static const int64_t nbytes = sysconf(_SC_PAGESIZE);
  return nbytes;
}

void* SharedHeap::Allocate(size_t nbytes) {
  if (!range_ || nbytes > static_cast<size_t>(range_->nbytes)) return nullptr;
  std::lock_guard<std::mutex> lock(mu);
  if (is_child_) return nullptr;
  const int64_t offset = blocks_->Take(RoundUp(static_cast<int64_t>(nbytes), PageNbytes()));
  peak_ = std::max(peak_, blocks_->used());
  return offset < 0 ? nullptr : base() + offset;
}

void SharedHeap::Free(void* p) {
  std::lock_guard<std::mutex> lock(mu);
  if (is_child_) return;  // It is the parent's.
  if (!blocks_->Give(OffsetOf(p))) AbortOf("free()");
  const auto now = Clock::now();
  if (now - window_began_ > kWindow) {
    peak_before_ = now - window_began_ > 2 * kWindow ? blocks_->used() : peak_;
    peak_ = blocks_->used();
    window_began_ = now;
  }
  if (blocks_->used() + blocks_->kept() > Peak() + kSlack) ReturnPages();
}

// Half of the slack stays: else the next buffer to be freed would be over the limit again.
void SharedHeap::ReturnPages() {
  while (blocks_->used() + blocks_->kept() > Peak() + kSlack / 2) {
    const std::optional<BlockMap::Range> hole = blocks_->Empty();
    if (!hole) return;
    madvise(base() + hole->offset, static_cast<size_t>(hole->nbytes), MADV_REMOVE);
  }
}

size_t SharedHeap::NbytesOf(void* p) {
  std::lock_guard<std::mutex> lock(mu);
  const int64_t nbytes = blocks_->NbytesOf(OffsetOf(p));
  if (nbytes < 0) AbortOf("malloc_usable_size()");
  return static_cast<size_t>(nbytes);
}

void SharedHeap::ForgetParent() {
  if (range_) mprotect(range_->base, static_cast<size_t>(range_->nbytes), PROT_NONE);
  is_child_ = true;
}

}  // namespace jcoll
