#include "peer_heap.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "segment.h"

namespace jcoll {

HeapPlace HeapPlace::Of(const HeapRange* heap) {
  if (heap == nullptr) return {};
  return {reinterpret_cast<uint64_t>(heap->base), heap->nbytes, heap->fd, heap->device,
          heap->inode};
}

PeerHeap::~PeerHeap() {
  if (data_ != nullptr) munmap(const_cast<char*>(data_), static_cast<size_t>(place_.nbytes));
}

bool PeerHeap::Map(int pid, const HeapPlace& place) {
  if (place.nbytes == 0) return true;
  // It may be a FIFO by now, whose open would wait for a writer.
  const int fd = OpenDescriptorOf(pid, place.fd, O_RDONLY | O_NONBLOCK);
  if (fd < 0) return false;
  struct stat s;
  void* p = MAP_FAILED;
  if (fstat(fd, &s) == 0 && s.st_dev == place.device && s.st_ino == place.inode &&
      s.st_size == place.nbytes) {
    p = mmap(nullptr, static_cast<size_t>(place.nbytes), PROT_READ, MAP_SHARED | MAP_NORESERVE, fd,
             0);
  }
  close(fd);
  if (p == MAP_FAILED) return false;
  madvise(p, static_cast<size_t>(place.nbytes), MADV_DONTDUMP);
  place_ = place;
  data_ = static_cast<const char*>(p);
  return true;
}

}  // namespace jcoll
