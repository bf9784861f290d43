#include "plan_store.h"

#include <map>
#include <mutex>
#include <tuple>
#include <utility>

namespace jcoll {
namespace {

struct Store {
  std::mutex mu;
  PlanMaker maker;
  std::map<PlanKey, std::shared_ptr<const LoadedPlan>> plans;
};

// Never destroyed: XLA's threads may outlive static destructors.
Store& GetStore() {
  static Store* store = new Store();
  return *store;
}

}  // namespace

bool PlanKey::operator<(const PlanKey& other) const {
  return std::tie(op, algorithm, num_ranks, root) <
         std::tie(other.op, other.algorithm, other.num_ranks, other.root);
}

void SetPlanMaker(PlanMaker maker) {
  Store& store = GetStore();
  std::lock_guard<std::mutex> lock(store.mu);
  store.maker = std::move(maker);
}

void ForgetPlans() {
  Store& store = GetStore();
  std::lock_guard<std::mutex> lock(store.mu);
  store.plans.clear();
}

std::variant<std::shared_ptr<const LoadedPlan>, Failure> PlanFor(const PlanKey& key) {
  Store& store = GetStore();
  PlanMaker maker;
  {
    std::lock_guard<std::mutex> lock(store.mu);
    const auto found = store.plans.find(key);
    if (found != store.plans.end()) return found->second;
    maker = store.maker;
  }
  if (!maker) return Failure{FailureCode::kInternal, "jcoll: plans are not available."};
  // Without the lock: the maker takes Python's, whose holder may be waiting for ours.
  auto made = maker(key);
  if (auto* failure = std::get_if<Failure>(&made)) return std::move(*failure);
  const std::string& encoded = std::get<std::string>(made);
  Plan plan;
  if (auto failure = DecodePlan(encoded.data(), static_cast<int64_t>(encoded.size()), &plan)) {
    return std::move(*failure);
  }
  if (plan.num_ranks != key.num_ranks) {
    return Failure{FailureCode::kInternal, "jcoll: a plan for another number of ranks was made."};
  }
  auto loaded = std::make_shared<LoadedPlan>();
  if (auto failure = MakeMoves(plan, &loaded->moves)) return std::move(*failure);
  if (auto failure = MakePrograms(plan, &loaded->programs)) return std::move(*failure);
  std::lock_guard<std::mutex> lock(store.mu);
  return store.plans.emplace(key, std::move(loaded)).first->second;
}

}  // namespace jcoll
