#include "block_map.h"

#include <iterator>

namespace jcoll {

int64_t BlockMap::Take(int64_t nbytes) {
  for (Holes* holes : {&kept_, &empty_}) {
    const Range hole = holes->TakeFit(nbytes);
    if (hole.offset < 0) continue;
    if (hole.nbytes > nbytes) holes->Add({hole.offset + nbytes, hole.nbytes - nbytes});
    blocks_[hole.offset] = nbytes;
    used_ += nbytes;
    return hole.offset;
  }
  return -1;
}

bool BlockMap::Give(int64_t offset) {
  const auto block = blocks_.find(offset);
  if (block == blocks_.end()) return false;
  kept_.Add({offset, block->second});
  used_ -= block->second;
  blocks_.erase(block);
  return true;
}

int64_t BlockMap::NbytesOf(int64_t offset) const {
  const auto block = blocks_.find(offset);
  return block == blocks_.end() ? -1 : block->second;
}

std::optional<BlockMap::Range> BlockMap::Empty() {
  const std::optional<Range> hole = kept_.TakeLargest();
  if (hole) empty_.Add(*hole);
  return hole;
}

void BlockMap::Holes::Add(Range hole) {
  auto next = at_.lower_bound(hole.offset);
  if (next != at_.end() && hole.offset + hole.nbytes == next->first) {
    hole.nbytes += next->second;
    Remove({next->first, next->second});
  }
  next = at_.lower_bound(hole.offset);
  if (next != at_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == hole.offset) {
      hole = {before->first, before->second + hole.nbytes};
      Remove({before->first, before->second});
    }
  }
  at_[hole.offset] = hole.nbytes;
  by_size_.insert({hole.nbytes, hole.offset});
  nbytes_ += hole.nbytes;
}

BlockMap::Range BlockMap::Holes::TakeFit(int64_t nbytes) {
  const auto found = by_size_.lower_bound({nbytes, 0});
  if (found == by_size_.end()) return {-1, 0};
  const Range hole{found->second, found->first};
  Remove(hole);
  return hole;
}

std::optional<BlockMap::Range> BlockMap::Holes::TakeLargest() {
  if (by_size_.empty()) return std::nullopt;
  const auto [nbytes, offset] = *by_size_.rbegin();
  Remove({offset, nbytes});
  return Range{offset, nbytes};
}

void BlockMap::Holes::Remove(Range hole) {
  at_.erase(hole.offset);
  by_size_.erase({hole.nbytes, hole.offset});
  nbytes_ -= hole.nbytes;
}

}  // namespace jcoll
