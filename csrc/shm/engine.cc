#include "engine.h"

#include <sched.h>

#include <algorithm>
#include <thread>

#include "../reduce.h"
#include "world.h"

namespace jcoll {
namespace {

// A sleeping thread takes 5-50 us to wake up. Peers on other cores answer within a few us; where
// there are more processes than cores, yielding lets them.
constexpr int64_t kSpinNs = 50000;
constexpr int64_t kTickNs = 20000000;

}  // namespace

RemoteEngine& RemoteEngine::Get() {
  static auto* engine = new RemoteEngine();  // Never destroyed, like its thread.
  return *engine;
}

void RemoteEngine::Add(std::shared_ptr<RemoteTask> task) {
  std::lock_guard<std::mutex> lock(mu_);
  new_.push_back(std::move(task));
  if (!running_) {
    running_ = true;
    std::thread([this] { Loop(); }).detach();
  }
  cv_.notify_one();
  World::Get()->Ring(World::Get()->self());
}

void RemoteEngine::TakeNew() {
  std::unique_lock<std::mutex> lock(mu_);
  if (active_.empty()) cv_.wait(lock, [this] { return !new_.empty(); });
  for (auto& task : new_) active_.push_back(std::move(task));
  new_.clear();
}

// Returns whether anything has moved.
bool RemoteEngine::AdvanceAll(bool check, int64_t now_ns) {
  bool moved = false;
  auto over = [&](const std::shared_ptr<RemoteTask>& task) {
    const bool is_over = task->AdvanceRemote(check, now_ns);
    moved |= is_over || task->RemoteMoved();
    return is_over;
  };
  active_.erase(std::remove_if(active_.begin(), active_.end(), over), active_.end());
  return moved;
}

void RemoteEngine::Loop() {
  ScopedFlushDenormals flush;
  World* world = World::Get();
  int64_t last_move = 0, last_check = 0;
  for (;;) {
    TakeNew();
    int64_t now = MonotonicNs();
    const bool check = now - last_check > kTickNs;
    if (check) {
      last_check = now;
      world->WatchIdleness(now);
    }
    if (AdvanceAll(check, now)) {
      last_move = now;
    } else if (now - last_move < kSpinNs) {
      sched_yield();
    } else {
      world->Sleep(kTickNs, [&] {
        std::lock_guard<std::mutex> lock(mu_);
        return !new_.empty() || AdvanceAll(/*check=*/false, now);
      });
    }
  }
}

}  // namespace jcoll
