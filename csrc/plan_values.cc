#include "plan_values.h"

#include <algorithm>
#include <utility>

namespace jcoll {

PlanValues::PlanValues(const Plan& plan) : plan_(plan) {
  for (int b = 0; b < 3; ++b) {
    base_[b] = stride_;
    stride_ += plan.num_chunks(static_cast<PlanBuffer>(b));
  }
  places_.assign(static_cast<size_t>(stride_) * plan.num_ranks, kNone);
}

PlanValues::Id* PlanValues::Place(const ChunkRef& c) {
  return &places_[static_cast<size_t>(c.rank) * stride_ + base_[static_cast<int>(c.buffer)] +
                  c.chunk];
}

PlanValues::Id PlanValues::At(const ChunkRef& place) {
  Id* id = Place(place);
  if (*id == kNone && place.buffer == PlanBuffer::kInput) {
    *id = static_cast<Id>(values_.size());
    values_.emplace_back();
    values_.back().place = place;
    values_.back().part = place.chunk % plan_.chunks_per_block;
  }
  return *id;
}

void PlanValues::Write(const ChunkRef& place, int32_t part, std::vector<Id> srcs) {
  const int32_t index = static_cast<int32_t>(operations_.size());
  for (Id src : srcs) values_[src].users.push_back(index);
  Id* held = Place(place);
  const Id id = static_cast<Id>(values_.size());
  if (*held != kNone) {
    values_[*held].overwritten = index;
    values_[*held].after = id;
  }
  values_.emplace_back();
  values_.back().place = place;
  values_.back().part = part;
  values_.back().writer = index;
  values_.back().before = *held;
  *held = id;
  operations_.push_back({std::move(srcs), {id}});
}

void PlanValues::Simplify() {
  const int32_t n = static_cast<int32_t>(operations_.size());
  for (int32_t i = 0; i < n; ++i) Fold(i);
  first_copy_.assign(values_.size(), kNone);
  for (int32_t i = 0; i < n; ++i) FanOut(i);
}

bool PlanValues::IsResult(Id id) const {
  const Value& v = values_[id];
  return v.overwritten == kForever && v.place.buffer == PlanBuffer::kOutput;
}

bool PlanValues::CanFold(Id id, int32_t user) const {
  const Value& v = values_[id];
  if (v.writer == kNone || v.users.size() != 1 || IsResult(id)) return false;
  const std::vector<Id>& operands = operations_[v.writer].srcs;
  // An operation reads before it writes: one that its user ends is still there for it.
  return !operands.empty() && std::all_of(operands.begin(), operands.end(), [&](Id operand) {
    // The write to v's own place will not happen.
    const int32_t end = values_[operand].overwritten;
    return (end == v.writer ? v.overwritten : end) >= user;
  });
}

void PlanValues::Fold(int32_t user) {
  std::vector<Id> srcs;
  for (Id id : operations_[user].srcs) {
    if (!CanFold(id, user)) {
      srcs.push_back(id);
      continue;
    }
    const int32_t writer = values_[id].writer;
    for (Id operand : operations_[writer].srcs) {
      std::vector<int32_t>& users = values_[operand].users;
      *std::find(users.begin(), users.end(), writer) = user;
      srcs.push_back(operand);
    }
    operations_[writer].srcs.clear();
    Remove(writer);
  }
  operations_[user].srcs = std::move(srcs);
}

// What the places of its values held before stays there until the next write.
void PlanValues::Remove(int32_t operation) {
  for (Id id : operations_[operation].dsts) {
    const Value& v = values_[id];
    if (v.before != kNone) {
      values_[v.before].overwritten = v.overwritten;
      values_[v.before].after = v.after;
    }
    if (v.after != kNone) values_[v.after].before = v.before;
  }
  operations_[operation].dsts.clear();
}

// The operation that can write the copy of `source` too: the one that makes it, or that has copied
// it first.
int32_t PlanValues::MakerOf(Id source, int32_t copy) {
  if (values_[source].writer != kNone) return values_[source].writer;
  if (first_copy_[source] == kNone) first_copy_[source] = copy;
  return first_copy_[source];
}

void PlanValues::FanOut(int32_t copy) {
  Operation& op = operations_[copy];
  if (op.srcs.size() != 1 || op.dsts.size() != 1) return;
  const Id source = op.srcs[0], id = op.dsts[0];
  const int32_t maker = MakerOf(source, copy);
  if (maker == copy) return;
  // From the maker to here nobody may have looked at, or written to, the place of the copy.
  const Id before = values_[id].before;
  if (before != kNone) {
    const Value& held = values_[before];
    if (held.writer >= maker) return;
    for (int32_t user : held.users) {
      if (user > maker) return;
    }
    values_[before].overwritten = maker;
  }
  std::vector<int32_t>& users = values_[source].users;
  users.erase(std::find(users.begin(), users.end(), copy));
  values_[id].writer = maker;
  operations_[maker].dsts.push_back(id);
  op = {};
}

}  // namespace jcoll
