// Which parts of a range of memory are in use: the bookkeeping of SharedHeap, which looks at no
// memory itself.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <unordered_map>
#include <utility>

namespace jcoll {

// Best fit, and of those the lowest: what is asked for again and again gets the same place again,
// whose pages are there and may be in the cache. Neighbouring holes are joined. One thread at a
// time.
class BlockMap {
 public:
  struct Range {
    int64_t offset = 0, nbytes = 0;
  };
  explicit BlockMap(int64_t nbytes) { AddHole(0, {nbytes, 0}); }

  // The offset of a new block; -1: there is no hole of that size.
  int64_t Take(int64_t nbytes);
  // Ends a block, and returns the hole that it is in now.
  Range Give(int64_t offset);
  int64_t NbytesOf(int64_t offset) const { return blocks_.at(offset); }
  // The hole at `offset` has been given back to the system.
  void Empty(int64_t offset);

  int64_t used() const { return used_; }
  // What holes have been used for and still hold. Where only a part of a hole is taken, that which
  // has been used counts as taken first.
  int64_t kept() const { return kept_; }

 private:
  struct Hole {
    int64_t nbytes, kept;
  };
  using Holes = std::map<int64_t, Hole>;
  void AddHole(int64_t offset, Hole hole);
  Hole RemoveHole(Holes::iterator hole);

  std::unordered_map<int64_t, int64_t> blocks_;  // Their sizes, by offset.
  Holes holes_;                                  // By offset,
  std::set<std::pair<int64_t, int64_t>> sizes_;  // and by size and offset.
  int64_t used_ = 0, kept_ = 0;
};

}  // namespace jcoll
