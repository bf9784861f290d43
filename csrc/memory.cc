#include "memory.h"

#include <algorithm>
#include <cstring>
#include <fstream>

#include "reduce_kernels.h"

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14; older headers do not name it, older kernels refuse it
#endif
#endif

namespace jcoll {
namespace {

// What is read once and written several times stays in the L2 cache between; shorter runs cost more
// than the L1 cache saves. 1 MiB by each of two cores of an EPYC, us by the size of the tile:
//   tile             4 KiB   16 KiB   64 KiB   128 KiB   1 MiB
//   2 destinations      30       26       25        25      33
//   4                   53       45       44        43      74
//   8                  107       86       82        81     150
constexpr int64_t kTileBytes = 64 << 10;

void Copy(void* dst, const void* src, int64_t nbytes, bool stream) {
  if (stream) {
    CurrentKernels().stream_copy(dst, src, nbytes);
  } else {
    std::memcpy(dst, src, static_cast<size_t>(nbytes));
  }
}

}  // namespace

// sysconf(_SC_LEVEL3_CACHE_SIZE) adds up those of all cores on some processors.
int64_t LastLevelCacheNbytes() {
  static const int64_t nbytes = [] {
    std::ifstream file("/sys/devices/system/cpu/cpu0/cache/index3/size");  // "32768K"
    int64_t kib = 0;
    char unit = 0;
    return file >> kib >> unit && kib > 0 && unit == 'K' ? kib << 10 : int64_t{32} << 20;
  }();
  return nbytes;
}

void CopyTo(const void* src, void* const* dsts, int num_dsts, int64_t nbytes, bool stream) {
  const char* from = static_cast<const char*>(src);
  const int64_t tile = num_dsts == 1 ? nbytes : kTileBytes;
  for (int64_t begin = 0; begin < nbytes; begin += tile) {
    const int64_t n = std::min(tile, nbytes - begin);
    for (int d = 0; d < num_dsts; ++d) {
      if (dsts[d] != src) Copy(static_cast<char*>(dsts[d]) + begin, from + begin, n, stream);
    }
  }
  if (stream) CurrentKernels().stream_fence();
}

void Zero(void* dst, int64_t nbytes, bool stream) {
  if (!stream) {
    if (nbytes > 0) std::memset(dst, 0, static_cast<size_t>(nbytes));
    return;
  }
  alignas(64) static constexpr char kZeros[4096] = {};
  constexpr int64_t kStep = sizeof(kZeros);
  for (int64_t begin = 0; begin < nbytes; begin += kStep) {
    Copy(static_cast<char*>(dst) + begin, kZeros, std::min(kStep, nbytes - begin), true);
  }
  CurrentKernels().stream_fence();
}

#if defined(__linux__)

namespace {

// The whole units inside [p, p + nbytes).
struct Interior {
  Interior(void* p, int64_t nbytes, int64_t unit) {
    const int64_t address = static_cast<int64_t>(reinterpret_cast<intptr_t>(p));
    const int64_t first = (address + unit - 1) / unit * unit;
    begin = static_cast<char*>(p) + (first - address);
    size = std::max<int64_t>(0, (address + nbytes) / unit * unit - first);
  }
  char* begin;
  int64_t size;
};

}  // namespace

bool LooksFresh(void* p, int64_t nbytes) {
  static const int64_t page = sysconf(_SC_PAGESIZE);
  const Interior pages(p, nbytes, page);
  if (pages.size == 0) return false;
  // The last page stands for all: a buffer cut from the end of the heap has old pages first.
  unsigned char mapped = 1;
  mincore(pages.begin + pages.size - page, static_cast<size_t>(page), &mapped);
  return (mapped & 1) == 0;
}

void AdviseHugePages(void* p, int64_t nbytes) {
  const Interior huge(p, nbytes, int64_t{2} << 20);
  if (huge.size > 0) madvise(huge.begin, static_cast<size_t>(huge.size), MADV_HUGEPAGE);
}

void Prefault(void* p, int64_t nbytes) {
  constexpr int64_t kMinBytes = 64 << 10;
  static const int64_t page = sysconf(_SC_PAGESIZE);
  const Interior pages(p, nbytes, page);
  if (pages.size < kMinBytes || !LooksFresh(pages.begin, pages.size)) return;
  madvise(pages.begin, static_cast<size_t>(pages.size), MADV_POPULATE_WRITE);
}

#else

bool LooksFresh(void*, int64_t) { return false; }
void AdviseHugePages(void*, int64_t) {}
void Prefault(void*, int64_t) {}

#endif

}  // namespace jcoll
