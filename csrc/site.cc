#include "site.h"

#include <algorithm>
#include <atomic>
#include <set>

namespace jcoll {
namespace {

std::atomic<double> g_default_timeout{300.0};

// Collectives that failed and whose missing ranks never came, kept per site for their late arrival.
constexpr size_t kMaxTombstones = 64;

// All sites, for the deadline scan. Lock order: registry, then site.
struct Registry {
  std::mutex mu;
  std::set<Site*> sites;
};

Registry& GetRegistry() {
  static Registry* registry = new Registry();
  return *registry;
}

bool ExpireAll(Executor::Clock::time_point now) {
  Registry& registry = GetRegistry();
  std::lock_guard<std::mutex> lock(registry.mu);
  bool any_open = false;
  for (Site* site : registry.sites) any_open |= site->ExpireOverdue(now);
  return any_open;
}

}  // namespace

void SetDefaultTimeout(double seconds) { g_default_timeout.store(seconds); }
double DefaultTimeout() { return g_default_timeout.load(std::memory_order_relaxed); }

Site::Site(Description description)
    : description_(std::make_shared<const Description>(std::move(description))),
      metrics_(MetricsFor(*description_)),
      policy_(std::make_shared<SitePolicy>()) {
  Registry& registry = GetRegistry();
  std::lock_guard<std::mutex> lock(registry.mu);
  registry.sites.insert(this);
}

Site::~Site() {
  Registry& registry = GetRegistry();
  std::lock_guard<std::mutex> lock(registry.mu);
  registry.sites.erase(this);
}

void Site::Arrive(int64_t run_id, int64_t position, const RankBuffers& buffers,
                  Completion completion) {
  const Description& d = *description_;
  const int64_t axis_index = position % d.axis_size;
  const int group = d.group_of.empty() ? 0 : static_cast<int>(d.group_of[axis_index]);
  const int rank = static_cast<int>(d.group_of.empty() ? axis_index : d.rank_of[axis_index]);

  std::shared_ptr<Collective> collective;
  bool all_arrived, failed;
  {
    std::lock_guard<std::mutex> lock(mu_);
    collective = FindOrOpenLocked(run_id, position / d.axis_size, group, rank);
    collective->Add(rank, buffers, std::move(completion));
    all_arrived = collective->AllArrived();
    failed = collective->failed();
    if (all_arrived) RemoveLocked(collective.get());
  }
  if (failed) {
    Executor::Get().Push({{collective, rank}}, Executor::Wake::kLazy);
  } else if (all_arrived) {
    collective->Start();
  } else {
    Executor::Get().WatchDeadlines(ExpireAll);
  }
}

std::shared_ptr<Collective> Site::FindOrOpenLocked(int64_t run_id, int64_t mesh_group, int group,
                                                   int rank) {
  for (const Entry& e : open_) {
    if (e.run_id == run_id && e.mesh_group == mesh_group && e.collective->group() == group &&
        !e.collective->HasRank(rank)) {
      return e.collective;
    }
  }
  if (open_.size() > kMaxTombstones) {
    auto failed = std::find_if(open_.begin(), open_.end(),
                               [](const Entry& e) { return e.collective->failed(); });
    if (failed != open_.end()) open_.erase(failed);
  }
  const double timeout_s =
      description_->timeout_s > 0 ? description_->timeout_s : DefaultTimeout();
  open_.push_back({run_id, mesh_group,
                   std::make_shared<Collective>(description_, metrics_, policy_, group,
                                                timeout_s)});
  return open_.back().collective;
}

void Site::RemoveLocked(const Collective* collective) {
  open_.erase(std::find_if(open_.begin(), open_.end(), [collective](const Entry& e) {
    return e.collective.get() == collective;
  }));
}

bool Site::ExpireOverdue(Executor::Clock::time_point now) {
  std::vector<Task> tasks;
  bool any_open = false;
  {
    std::lock_guard<std::mutex> lock(mu_);
    for (const Entry& e : open_) {
      if (e.collective->failed()) continue;
      if (e.collective->IsExpired(now)) {
        for (Task& task : e.collective->Expire()) tasks.push_back(std::move(task));
      } else {
        any_open = true;
      }
    }
  }
  Executor::Get().Push(std::move(tasks), Executor::Wake::kAll);
  return any_open;
}

}  // namespace jcoll
