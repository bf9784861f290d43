// The plans of this process, by name. A compiled program holds a plan's name, not the plan: an
// all-ranks table grows with the square of the ranks.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <variant>

#include "failure.h"
#include "plan_moves.h"
#include "shm/program.h"

namespace jcoll {

struct PlanKey {
  std::string op, algorithm;
  int num_ranks = 1, root = 0;
  bool operator<(const PlanKey& other) const;
};

// A plan, ready to be run.
struct LoadedPlan {
  PlanMoves moves;        // With all ranks in this process.
  PlanPrograms programs;  // With ranks in several.
  // An output chunk that these would add in another order than rank 0's, and so must not be run.
  std::optional<ChunkRef> differs_remotely;
  // A hash of its encoding: processes may have registered different algorithms under one name.
  uint64_t digest = 0;
};

// Fails for a plan that makes no sense when its steps are followed. All ranks of an all_reduce get
// the same bits, if the plan's steps add in one order: reductions are folded only where that holds
// afterwards. Between processes folding cannot be left out; see differs_remotely.
std::optional<Failure> LoadPlan(const Plan& plan, LoadedPlan* loaded);

// Makes the encoded plan for a key (jcoll/plan/encode.py), or says why it cannot be had. Called on
// whichever threads instantiate programs; a plan that it has made is not asked for again, but by
// threads that ask meanwhile.
using PlanMaker = std::function<std::variant<std::string, Failure>(const PlanKey&)>;
void SetPlanMaker(PlanMaker maker);

// The plan for a key; made when it is first asked for.
std::variant<std::shared_ptr<const LoadedPlan>, Failure> PlanFor(const PlanKey& key);

// Forgets all plans, those that are being made too: an algorithm has been defined anew. Programs
// that hold one go on with it.
void ForgetPlans();

}  // namespace jcoll
