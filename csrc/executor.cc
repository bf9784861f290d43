#include "executor.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <cstdlib>
#include <system_error>

#include "cpu_relax.h"
#include "reduce.h"

namespace jcoll {
namespace {

using std::chrono::milliseconds;

// A queue that has not moved for one tick is stalled. Long enough that a busy but healthy machine
// seldom trips it, short enough that a program mixing lax and jcoll collectives is not slowed much
// before its sites have learned to wake everybody (Wake::kAll).
constexpr milliseconds kTick{1};
constexpr milliseconds kScanInterval{20};
// How long a worker looks for more before it sleeps, where tasks are long: about what waking it up
// would take.
constexpr std::chrono::microseconds kSpin{20};
// Ticks without anything queued after which the monitor goes to sleep.
constexpr int kQuietTicks = 100;
// Workers beyond the core count leave after this long without work.
constexpr milliseconds kSpareWorkerLife{10000};
// One thread per rank in flight is the most that progress can need; this bounds a runaway.
constexpr int kMaxWorkers = 1024;

std::atomic<Executor*> g_executor{nullptr};
std::mutex g_executor_mu;
std::atomic<int> g_num_threads{0};
thread_local bool t_is_worker = false;

int CoresOfThisProcess() {
#ifdef __linux__
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
#endif
  return std::max(1u, std::thread::hardware_concurrency());
}

void StopAtExit() {
  if (Executor* executor = g_executor.load()) executor->Stop();
}

// In the child none of the pool's threads exist and its mutex may be held by one of them: start
// over. The old object is leaked, as its destructor could not run either.
void ResetInChild() {
  g_executor.store(nullptr);
  t_is_worker = false;  // Where a continuation has forked.
}

// False if the system has no thread to give.
template <typename Fn>
bool StartThread(Fn fn) {
  try {
    std::thread(fn).detach();
    return true;
  } catch (const std::system_error&) {
    return false;
  }
}

}  // namespace

Executor& Executor::Get() {
  if (Executor* executor = g_executor.load(std::memory_order_acquire)) return *executor;
  std::lock_guard<std::mutex> lock(g_executor_mu);
  if (g_executor.load() == nullptr) {
    static std::once_flag once;
    std::call_once(once, [] {
      std::atexit(StopAtExit);
      pthread_atfork([] { g_executor_mu.lock(); }, [] { g_executor_mu.unlock(); },
                     [] {
                       ResetInChild();
                       g_executor_mu.unlock();
                     });
    });
    // Never destroyed: XLA threads may still be running when static destructors do.
    g_executor.store(new Executor(), std::memory_order_release);
  }
  return *g_executor.load();
}

void Executor::SetNumThreads(int num_threads) { g_num_threads.store(num_threads); }

int Executor::NumThreads() {
  int n = g_num_threads.load(std::memory_order_relaxed);
  if (n > 0) return n;
  static const int cores = CoresOfThisProcess();
  return cores;
}

Executor::Executor() = default;

void Executor::Push(std::vector<Task> tasks, Wake wake) {
  const int count = static_cast<int>(tasks.size());
  if (count == 0) return;
  std::unique_lock<std::mutex> lock(mu_);
  for (Task& task : tasks) queue_.push_back(std::move(task));
  AfterPush(&lock, count, wake);
}

void Executor::Push(const std::shared_ptr<Runnable>& runnable, int first, int count, Wake wake) {
  if (count <= 0) return;
  std::unique_lock<std::mutex> lock(mu_);
  for (int i = 0; i < count; ++i) queue_.push_back({runnable, first + i});
  AfterPush(&lock, count, wake);
}

void Executor::AfterPush(std::unique_lock<std::mutex>* lock, int count, Wake wake) {
  num_queued_.store(static_cast<int>(queue_.size()), std::memory_order_relaxed);
  switch (wake) {
    case Wake::kLazy:
      may_spin_ = false;
      if (!t_is_worker) WakeLocked(1 - num_spinning_);
      break;
    case Wake::kCores:
      may_spin_ = true;
      WakeLocked(std::min(count, NumThreads()) - (t_is_worker ? 1 : 0) - num_spinning_);
      break;
    case Wake::kHelpers:
      WakeLocked(count);
      break;
    case Wake::kAll:
      // Idle workers first; start what is missing, so that nothing waits for the monitor.
      WakeLocked(HaveIdleLocked(count));
      break;
  }
  StartMonitorLocked();
  // Without any thread to be had it is this one that does the work, which beats losing it.
  if (num_workers_ == 0 && !t_is_worker) {
    t_is_worker = true;
    RunQueue(lock);
    t_is_worker = false;
  }
}

void Executor::WakeLocked(int count) {
  while (num_idle_ < count && num_workers_ < NumThreads() && StartWorkerLocked()) {
  }
  for (int i = 0; i < std::min(count, num_idle_); ++i) work_cv_.notify_one();
}

// Has `count` workers idle, and returns how many: at most as many more as there are, until the next
// time. Not all at once: on a machine with more to do than it has cores, workers that only wait for
// one look no different from stuck ones, and a program of many independent collectives queues
// hundreds of tasks.
int Executor::HaveIdleLocked(int count) {
  count = std::min(count, std::max(NumThreads(), num_workers_));
  while (num_idle_ < count && num_workers_ < kMaxWorkers && StartWorkerLocked()) {
  }
  return count;
}

bool Executor::StartWorkerLocked() {
  if (!StartThread([this] { WorkerLoop(); })) return false;
  ++num_workers_;
  ++num_idle_;  // Until its first look at the queue.
  return true;
}

void Executor::WorkerLoop() {
  t_is_worker = true;
  ScopedFlushDenormals flush;
  std::unique_lock<std::mutex> lock(mu_);
  for (;;) {
    const bool has_work =
        work_cv_.wait_for(lock, kSpareWorkerLife, [this] { return !queue_.empty() || stopping_; });
    if (queue_.empty()) {
      if (stopping_ || (!has_work && num_workers_ > NumThreads())) break;
      continue;
    }
    --num_idle_;
    do {
      RunQueue(&lock);
    } while (SpinForMore(&lock));
    ++num_idle_;
  }
  --num_idle_;
  --num_workers_;
  exit_cv_.notify_all();
}

void Executor::RunQueue(std::unique_lock<std::mutex>* lock) {
  while (!queue_.empty()) {
    Task task = std::move(queue_.front());
    queue_.pop_front();
    num_queued_.store(static_cast<int>(queue_.size()), std::memory_order_relaxed);
    ++num_popped_;
    lock->unlock();
    task.runnable->Run(task.index);
    task.runnable.reset();
    lock->lock();
  }
}

// Whether there is more to do after a short while. Pushes count on who spins: a worker sleeps only
// if the queue is empty when it has the lock again.
bool Executor::SpinForMore(std::unique_lock<std::mutex>* lock) {
  if (!may_spin_ || stopping_) return false;
  ++num_spinning_;
  lock->unlock();
  const Clock::time_point give_up = Clock::now() + kSpin;
  while (num_queued_.load(std::memory_order_relaxed) == 0 && Clock::now() < give_up) CpuRelax();
  lock->lock();
  --num_spinning_;
  return !queue_.empty();
}

void Executor::StartMonitorLocked() {
  if (!monitor_running_) {
    monitor_running_ = StartThread([this] { MonitorLoop(); });
  } else if (monitor_asleep_) {
    monitor_cv_.notify_one();
  }
}

void Executor::WatchDeadlines(Scan scan) {
  // The common case, one load (sequentially consistent, see ScanDeadlines): the monitor is scanning
  // already. It may be about to stop, having found nothing; it then scans once more after clearing
  // scan_ (see MonitorLoop).
  if (scan_.load() != nullptr) return;
  std::lock_guard<std::mutex> lock(mu_);
  scan_.store(scan);
  StartMonitorLocked();
}

// If the queue has stood still from the last tick to this one, there are to be twice as many
// workers, and so on until every queued task has one.
void Executor::ResolveStallLocked() {
  const bool stalled =
      queued_at_last_tick_ && !queue_.empty() && num_popped_ == popped_at_last_tick_;
  popped_at_last_tick_ = num_popped_;
  queued_at_last_tick_ = !queue_.empty();
  if (!stalled) return;
  num_stalls_.fetch_add(1, std::memory_order_relaxed);
  HaveIdleLocked(static_cast<int>(queue_.size()));
  work_cv_.notify_all();
}

// Clears scan_ before the last scan: a collective opened before the clearing is seen by that scan,
// one opened after it calls WatchDeadlines anew.
void Executor::ScanDeadlines(Clock::time_point now) {
  Scan scan = scan_.load();
  if (scan == nullptr || scan(now)) return;
  scan_.store(nullptr);
  if (scan(now)) scan_.store(scan);
}

void Executor::MonitorLoop() {
  std::unique_lock<std::mutex> lock(mu_);
  int quiet_ticks = 0;
  Clock::time_point next_scan = Clock::now();
  while (!stopping_ || !queue_.empty() || scan_.load() != nullptr) {
    quiet_ticks = queue_.empty() ? quiet_ticks + 1 : 0;
    ResolveStallLocked();
    if (Clock::now() >= next_scan) {
      lock.unlock();
      ScanDeadlines(Clock::now());
      lock.lock();
      next_scan = Clock::now() + kScanInterval;
    }
    if (quiet_ticks < kQuietTicks) {
      monitor_cv_.wait_for(lock, kTick);
    } else if (SleepLocked(&lock)) {
      quiet_ticks = 0;
    }
  }
  monitor_running_ = false;
  exit_cv_.notify_all();
}

// Returns true if something was queued meanwhile.
bool Executor::SleepLocked(std::unique_lock<std::mutex>* lock) {
  const uint64_t popped = num_popped_;
  monitor_asleep_ = true;
  if (scan_.load() != nullptr) {
    monitor_cv_.wait_for(*lock, kScanInterval);
  } else if (!stopping_) {
    monitor_cv_.wait(*lock);
  }
  monitor_asleep_ = false;
  return num_popped_ != popped;
}

void Executor::Stop() {
  std::unique_lock<std::mutex> lock(mu_);
  stopping_ = true;
  work_cv_.notify_all();
  monitor_cv_.notify_all();
  // A worker that is blocked in a program that cannot finish must not keep the process alive, and
  // a deadline that is still far off neither.
  exit_cv_.wait_for(lock, milliseconds(2000), [this] {
    return num_workers_ == 0 && queue_.empty() && (!monitor_running_ || scan_.load() != nullptr);
  });
}

int Executor::num_alive() {
  std::lock_guard<std::mutex> lock(mu_);
  return num_workers_;
}

}  // namespace jcoll
