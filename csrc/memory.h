#ifndef JCOLL_MEMORY_H_
#define JCOLL_MEMORY_H_

#include <cstdint>

// Moving bytes: copies with several destinations, zero fill, and advice to the kernel about pages.
// Safe to call from many threads on disjoint ranges; nothing here allocates or fails.

namespace jcoll {

// Whether a collective that reads and writes so many bytes in all should stream. An ordinary store
// to a line that is in no cache reads it first, so streaming moves 2/3 of the bytes; but the reader
// of the result then finds it in memory only. Long copies gain less: on most machines memcpy's
// string instructions do not read the line either.
//
// Measured on 8 ranks, Xeon with 2 MiB of L2 per core, all_reduce of float32 and a pass that reads
// every result, ordinary time : streaming time,
//   bytes in all   1 MiB   2 MiB   4 MiB   8 MiB   16 MiB   32 MiB   256 MiB
//   all_reduce      0.36    0.54    1.22    1.38     1.73     1.68      2.00
//   and reading     0.27    0.40    0.89    0.99     1.24     1.49      1.73
// On an EPYC with 32 MiB of L3, without reading: 16 MiB on 2 ranks 0.65 (all_reduce, ppermute);
// 32 MiB on 4 ranks 1.1 (both); 36 MiB on 8 ranks 0.9 (all_gather, which writes every line that it
// reads 8 times).
inline bool ShouldStream(int64_t traffic_nbytes, bool reduces, bool fans_out) {
  const int64_t mib = reduces ? 24 : fans_out ? 48 : 32;
  return traffic_nbytes >= mib << 20;
}

// The size of the cache that the first core shares with others; 32 MiB where the system does not
// say.
int64_t LastLevelCacheNbytes();

// Copies nbytes >= 0 from src to each of num_dsts destinations; src is read from memory once.
// A destination equal to src is skipped; they must not overlap otherwise. Any alignment.
// `stream`: as in Reduce.
void CopyTo(const void* src, void* const* dsts, int num_dsts, int64_t nbytes, bool stream);

void Zero(void* dst, int64_t nbytes, bool stream);

// Whether nothing has been written to [p, p + nbytes) since the kernel gave it to the process, as
// far as its last page tells. Only Linux, elsewhere false; a system call of about 1 us.
bool LooksFresh(void* p, int64_t nbytes);

// Asks for 2 MiB pages in the part of [p, p + nbytes) that can have them. Call it before the first
// write to a fresh buffer: page faults are most of the cost of writing one. Only Linux; does
// nothing for small buffers; errors are ignored, because the program is right without.
void AdviseHugePages(void* p, int64_t nbytes);

// Has the kernel map the pages of [p, p + nbytes) for writing in one go, if they look unmapped,
// which costs up to a half less than a fault for each page. For fresh buffers which AdviseHugePages
// cannot help: up to a few MiB. Call it just before the range is written, with a piece that fits in
// the L2 cache together with what is written at the same time: 256 KiB. Only Linux; 1 us when the
// pages are there; errors are ignored.
void Prefault(void* p, int64_t nbytes);

}  // namespace jcoll

#endif  // JCOLL_MEMORY_H_
