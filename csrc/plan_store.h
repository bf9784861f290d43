// The plans of this process, by name. A compiled program holds a plan's name, not the plan: an
// all-ranks table grows with the square of the ranks.
#pragma once

#include <functional>
#include <memory>
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
};

// Makes the encoded plan for a key (jcoll/plan/encode.py), or says why it cannot be had. Called on
// whichever thread instantiates a program, at most once per key that it can serve.
using PlanMaker = std::function<std::variant<std::string, Failure>(const PlanKey&)>;
void SetPlanMaker(PlanMaker maker);

// The plan for a key; made when it is first asked for.
std::variant<std::shared_ptr<const LoadedPlan>, Failure> PlanFor(const PlanKey& key);

// Forgets a plan: its algorithm has been defined anew. Programs that hold it go on with it.
void ForgetPlans();

}  // namespace jcoll
