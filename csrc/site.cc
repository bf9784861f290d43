#include "site.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <set>

#include "fork_safe.h"

namespace jcoll {
namespace {

// Enough for as many runs in flight as do not crowd each other anyway.
constexpr size_t kMaxSpare = 16;

std::atomic<double> g_default_timeout{300.0};

// All sites, for the deadline scan. Lock order: registry, then site.
struct Registry {
  std::mutex mu;
  std::set<Site*> sites;
  // The parent's open collectives are the parent's to complete.
  void ForgetParent() { sites.clear(); }
};

// Run ids count launches, from anywhere, and may wrap around at 32 bits.
bool IsBefore(int64_t run_id, int64_t other) {
  return static_cast<int32_t>(static_cast<uint32_t>(run_id) - static_cast<uint32_t>(other)) < 0;
}

bool ExpireAll(Executor::Clock::time_point now) {
  Site::Expired expired;
  bool any_open = false;
  {
    Registry& registry = ForkSafe<Registry>();
    std::lock_guard<std::mutex> lock(registry.mu);
    for (Site* site : registry.sites) any_open |= site->ExpireOverdue(now, &expired);
  }
  // Without the lock: a full pipe may hold the writer up, and a continuation may destroy an
  // executable and so a site. The text goes to stderr as well because the missing rank may yet
  // enter a collective of XLA's own, which the failed ranks will not reach: XLA then ends the
  // process before the exception is seen. To the report before that, for the pipe's sake.
  for (const std::string& text : expired.texts) ReportWithMetrics(text);
  for (const std::string& text : expired.texts) std::fprintf(stderr, "%s\n", text.c_str());
  Executor::Get().Push(std::move(expired.tasks), Executor::Wake::kAll);
  return any_open;
}

}  // namespace

int64_t NextOrdinal(const std::string& program, int64_t site_index) {
  static std::mutex mu;
  static auto* counts = new std::map<std::pair<std::string, int64_t>, int64_t>();
  std::lock_guard<std::mutex> lock(mu);
  return (*counts)[{program, site_index}]++;
}

size_t NumSites() {
  Registry& registry = ForkSafe<Registry>();
  std::lock_guard<std::mutex> lock(registry.mu);
  return registry.sites.size();
}

void SetDefaultTimeout(double seconds) { g_default_timeout.store(seconds); }
double DefaultTimeout() { return g_default_timeout.load(std::memory_order_relaxed); }

Site::Site(Description description)
    : description_(std::make_shared<const Description>(std::move(description))),
      metrics_(MetricsFor(*description_)),
      policy_(std::make_shared<SitePolicy>()) {
  Registry& registry = ForkSafe<Registry>();
  std::lock_guard<std::mutex> lock(registry.mu);
  registry.sites.insert(this);
}

Site::~Site() {
  Registry& registry = ForkSafe<Registry>();
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
  bool all_arrived, failed, stays;
  {
    std::lock_guard<std::mutex> lock(mu_);
    collective = FindOrOpenLocked(run_id, position / d.axis_size, group, rank);
    collective->Add(rank, buffers, std::move(completion));
    all_arrived = collective->AllArrived();
    failed = collective->failed();
    // Whose handlers may be running: all ranks that have been seen, not those of one group.
    const int64_t num_ranks = d.axis_size * num_mesh_groups_;
    stays = !all_arrived && !failed && collective->BeginStay(rank, num_ranks);
    if (all_arrived) RemoveLocked(collective.get());
  }
  if (failed) {
    Executor::Get().Push({collective->CompletionOf(rank)}, Executor::Wake::kLazy);
  } else if (all_arrived) {
    collective->Start(rank);
  } else {
    Executor::Get().WatchDeadlines(ExpireAll);
    if (stays) collective->Stay(rank);
  }
}

std::shared_ptr<Collective> Site::FindOrOpenLocked(int64_t run_id, int64_t mesh_group, int group,
                                                   int rank) {
  auto awaits = [&](const Entry& e) {
    return e.run_id == run_id && e.collective->mesh_group() == mesh_group &&
           e.collective->group() == group && !e.collective->HasRank(rank);
  };
  // What has failed was opened first.
  const auto failed = std::find_if(failed_.begin(), failed_.end(), awaits);
  if (failed != failed_.end()) return failed->collective;
  const auto open = std::find_if(open_.begin(), open_.end(), awaits);
  if (open != open_.end()) return open->collective;
  const double timeout_s = description_->timeout_s > 0 ? description_->timeout_s : DefaultTimeout();
  num_mesh_groups_ = std::max(num_mesh_groups_, mesh_group + 1);
  int64_t visit = 0;
  bool is_overtaken = false;
  if (!description_->process_of.empty()) {
    Visits& visits = visits_[{mesh_group, group}];
    is_overtaken = visits.count > 0 && IsBefore(run_id, visits.last_run_id);
    visits.last_run_id = run_id;
    visit = visits.count++;
  }
  open_.push_back({run_id, SpareLocked()});
  open_.back().collective->Open(group, mesh_group, timeout_s, visit, is_overtaken);
  return open_.back().collective;
}

std::shared_ptr<Collective> Site::SpareLocked() {
  for (auto it = spare_.begin(); it != spare_.end(); ++it) {
    if (!(*it)->IsOver()) continue;
    std::shared_ptr<Collective> spare = std::move(*it);
    spare_.erase(it);
    return spare;
  }
  return std::make_shared<Collective>(description_, metrics_, policy_);
}

void Site::RemoveLocked(const Collective* collective) {
  auto is_it = [collective](const Entry& e) { return e.collective.get() == collective; };
  if (collective->failed()) {
    failed_.erase(std::find_if(failed_.begin(), failed_.end(), is_it));
  } else {
    const auto entry = std::find_if(open_.begin(), open_.end(), is_it);
    if (spare_.size() < kMaxSpare) spare_.push_back(std::move(entry->collective));
    open_.erase(entry);
  }
}

bool Site::ExpireOverdue(Executor::Clock::time_point now, Expired* expired) {
  std::lock_guard<std::mutex> lock(mu_);
  auto overdue = std::stable_partition(
      open_.begin(), open_.end(), [now](const Entry& e) { return !e.collective->IsExpired(now); });
  for (auto e = overdue; e != open_.end(); ++e) {
    for (Task& task : e->collective->Expire(num_mesh_groups_)) {
      expired->tasks.push_back(std::move(task));
    }
    expired->texts.push_back(e->collective->failure()->message);
    failed_.push_back(std::move(*e));
    if (failed_.size() > kMaxFailed) failed_.pop_front();
  }
  open_.erase(overdue, open_.end());
  return !open_.empty();
}

size_t Site::num_held() {
  std::lock_guard<std::mutex> lock(mu_);
  return open_.size() + failed_.size();
}

}  // namespace jcoll
