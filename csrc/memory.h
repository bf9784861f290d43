#ifndef JCOLL_MEMORY_H_
#define JCOLL_MEMORY_H_

#include <cstdint>

// Moving bytes: copies with several destinations, zero fill, and advice to the kernel about pages.
// Safe to call from many threads on disjoint ranges; nothing here allocates or fails.

namespace jcoll {

// Copies nbytes >= 0 from src to each of num_dsts destinations; src is read from memory once.
// A destination equal to src is skipped; they must not overlap otherwise. Any alignment.
// `stream`: as in Reduce.
void CopyTo(const void* src, void* const* dsts, int num_dsts, int64_t nbytes, bool stream);

// Copies `num_rows` rows of row_bytes each; rows start src_stride and dst_stride bytes apart.
void CopyRows(const void* src, int64_t src_stride, void* dst, int64_t dst_stride, int64_t num_rows,
              int64_t row_bytes, bool stream);

void Zero(void* dst, int64_t nbytes, bool stream);

// Asks for 2 MiB pages in the part of [p, p + nbytes) that can have them. Call it before the first
// write to a fresh buffer: page faults are most of the cost of writing one. Only Linux; does nothing
// for small buffers; errors are ignored, because the program is right without.
void AdviseHugePages(void* p, int64_t nbytes);

// Has the kernel map the pages of [p, p + nbytes) for writing in one go, if they look unmapped: half the
// cost of a fault for each page. Call it just before the range is written, with a piece that fits in the
// L2 cache with its siblings (256 KiB). Returns true if it mapped pages: their lines are in the cache now,
// so `stream` would lose. Only Linux; cheap when the pages are there; errors are ignored.
bool Prefault(void* p, int64_t nbytes);

}  // namespace jcoll

#endif  // JCOLL_MEMORY_H_
