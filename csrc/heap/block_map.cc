#include "block_map.h"

#include <algorithm>
#include <iterator>

namespace jcoll {

int64_t BlockMap::Take(int64_t nbytes) {
  const auto found = sizes_.lower_bound({nbytes, 0});
  if (found == sizes_.end()) return -1;
  const int64_t offset = found->second;
  const Hole hole = RemoveHole(holes_.find(offset));
  if (hole.nbytes > nbytes) {
    AddHole(offset + nbytes, {hole.nbytes - nbytes, std::max<int64_t>(0, hole.kept - nbytes)});
  }
  blocks_[offset] = nbytes;
  used_ += nbytes;
  return offset;
}

BlockMap::Range BlockMap::Give(int64_t offset) {
  const auto block = blocks_.find(offset);
  Hole hole{block->second, block->second};
  used_ -= block->second;
  blocks_.erase(block);
  auto next = holes_.lower_bound(offset);
  if (next != holes_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second.nbytes == offset) {
      offset = before->first;
      const Hole joined = RemoveHole(before);
      hole = {hole.nbytes + joined.nbytes, hole.kept + joined.kept};
    }
  }
  if (next != holes_.end() && offset + hole.nbytes == next->first) {
    const Hole joined = RemoveHole(next);
    hole = {hole.nbytes + joined.nbytes, hole.kept + joined.kept};
  }
  AddHole(offset, hole);
  return {offset, hole.nbytes};
}

void BlockMap::Empty(int64_t offset) {
  Hole& hole = holes_.at(offset);
  kept_ -= hole.kept;
  hole.kept = 0;
}

void BlockMap::AddHole(int64_t offset, Hole hole) {
  holes_[offset] = hole;
  sizes_.insert({hole.nbytes, offset});
  kept_ += hole.kept;
}

BlockMap::Hole BlockMap::RemoveHole(Holes::iterator it) {
  const Hole hole = it->second;
  sizes_.erase({hole.nbytes, it->first});
  holes_.erase(it);
  kept_ -= hole.kept;
  return hole;
}

}  // namespace jcoll
