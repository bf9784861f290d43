#include "plan_store.h"

#include <map>
#include <mutex>
#include <tuple>
#include <utility>

#include "plan_bits.h"

namespace jcoll {
namespace {

struct Store {
  std::mutex mu;
  PlanMaker maker;
  std::map<PlanKey, std::shared_ptr<const LoadedPlan>> plans;
  int64_t num_forgotten = 0;  // Calls of ForgetPlans.
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
  ++store.num_forgotten;
}

std::optional<Failure> LoadPlan(const Plan& plan, LoadedPlan* loaded) {
  if (auto failure = MakeMoves(plan, &loaded->moves)) return failure;
  if (DifferingBits(plan, loaded->moves)) {
    if (auto failure = MakeMoves(plan, &loaded->moves, /*simplify=*/false)) return failure;
  }
  if (auto failure = MakePrograms(plan, &loaded->programs)) return failure;
  loaded->differs_remotely = DifferingBits(plan, loaded->programs);
  return std::nullopt;
}

std::variant<std::shared_ptr<const LoadedPlan>, Failure> PlanFor(const PlanKey& key) {
  Store& store = GetStore();
  PlanMaker maker;
  int64_t num_forgotten;
  {
    std::lock_guard<std::mutex> lock(store.mu);
    num_forgotten = store.num_forgotten;
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
  loaded->digest = std::hash<std::string>()(encoded);
  if (auto failure = LoadPlan(plan, loaded.get())) return std::move(*failure);
  std::lock_guard<std::mutex> lock(store.mu);
  // The one who asked gets what was right then; who asks later, what is right now.
  if (store.num_forgotten != num_forgotten) return loaded;
  return store.plans.emplace(key, std::move(loaded)).first->second;
}

}  // namespace jcoll
