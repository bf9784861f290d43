// The transfers of a plan as a program on values, and its simplification.
//
// Every write makes a new value, which lives in its chunk until the next write there. Where all
// ranks are in one process, much of what a plan stores is never looked at again: a ring stores
// every partial sum on the way. Two rewrites, as in any compiler:
//
// - Fold: a value that is used once, and is not a result, is not stored: its operands become those
//   of its user. A ring's n - 1 reductions of a chunk become one, of n operands: one pass over
//   memory, and one rounding for the 16-bit types.
// - Fan out: copies of a value are written by whoever makes it, from registers.
//
// Each moves reads or writes in time, and is done only if the chunks concerned are not touched
// in between.
#pragma once

#include <cstdint>
#include <vector>

#include "plan.h"

namespace jcoll {

struct ChunkRef {
  int32_t rank;
  PlanBuffer buffer;
  int32_t chunk;
};

class PlanValues {
 public:
  using Id = int32_t;
  static constexpr Id kNone = -1;

  struct Value {
    ChunkRef place;
    int32_t part = 0;                  // Its length is that of chunk number `part` of a block.
    int32_t writer = kNone;            // The operation that makes it; none for INPUT.
    int32_t overwritten = kForever;    // The operation that ends it.
    Id before = kNone, after = kNone;  // What its place holds until then, and from then on.
    std::vector<int32_t> users;        // Operations that read it.
  };
  // dsts = the reduction of srcs; a copy of one; zeros of none. Empty dsts: removed.
  struct Operation {
    std::vector<Id> srcs, dsts;
  };
  static constexpr int32_t kForever = INT32_MAX;

  explicit PlanValues(const Plan& plan);

  // The value that a chunk holds now, or kNone.
  Id At(const ChunkRef& place);
  // Appends an operation that writes to a chunk.
  void Write(const ChunkRef& place, int32_t part, std::vector<Id> srcs);
  // Both rewrites, on all operations.
  void Simplify();
  // Whether a value is read by nobody: it is a result.
  bool IsUnread(Id id) const { return values_[id].users.empty(); }

  const std::vector<Operation>& operations() const { return operations_; }
  const Value& value(Id id) const { return values_[id]; }

 private:
  Id* Place(const ChunkRef& place);
  bool IsResult(Id id) const;
  void Fold(int32_t user);
  bool CanFold(Id id, int32_t user) const;
  void FanOut(int32_t copy);
  int32_t MakerOf(Id source, int32_t copy);
  void Remove(int32_t operation);

  const Plan& plan_;
  int base_[3] = {}, stride_ = 0;
  std::vector<Id> places_;  // The value in each chunk of each rank.
  std::vector<Value> values_;
  std::vector<Operation> operations_;
  std::vector<int32_t> first_copy_;  // By value: the first copy of it that is left.
};

}  // namespace jcoll
