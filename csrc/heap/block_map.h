// Which parts of a range of memory are in use: the bookkeeping of SharedHeap, which looks at no
// memory itself.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>

namespace jcoll {

// Blocks and, between them, holes of two kinds: *kept* ones have been used, and their pages are
// there; *empty* ones have none. Neighbouring holes of a kind are one. Best fit, kept ones first,
// and of those that fit alike the lowest: what is asked for again and again gets the same place,
// which may be in the cache. One thread at a time.
class BlockMap {
 public:
  struct Range {
    int64_t offset = 0, nbytes = 0;
  };
  explicit BlockMap(int64_t nbytes) { empty_.Add({0, nbytes}); }

  // The offset of a new block; -1: there is no hole of that size.
  int64_t Take(int64_t nbytes);
  // Ends a block. False: none begins there.
  bool Give(int64_t offset);
  // -1: none begins there.
  int64_t NbytesOf(int64_t offset) const;
  // The largest kept hole, which is empty from now on; nothing if there is none.
  std::optional<Range> Empty();

  int64_t used() const { return used_; }
  int64_t kept() const { return kept_.nbytes(); }

 private:
  class Holes {
   public:
    void Add(Range hole);
    // Removes the best fit; offset -1: there is none.
    Range TakeFit(int64_t nbytes);
    std::optional<Range> TakeLargest();
    int64_t nbytes() const { return nbytes_; }

   private:
    void Remove(Range hole);
    std::map<int64_t, int64_t> at_;                  // Sizes by offset,
    std::set<std::pair<int64_t, int64_t>> by_size_;  // and by size and offset.
    int64_t nbytes_ = 0;
  };

  std::unordered_map<int64_t, int64_t> blocks_;  // Sizes by offset.
  Holes kept_, empty_;
  int64_t used_ = 0;
};

}  // namespace jcoll
