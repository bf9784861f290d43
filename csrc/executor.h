// The worker pool: runs pieces of large collectives, and completions (the setting of a promise,
// which makes XLA go on with the program of one rank, on the thread that sets it).
//
// Why completions need a pool. Setting a promise runs the rank's program inline up to its next
// pending future. That may be long (a matmul) and may even block (lax's own in-process collectives
// hold a thread until every device has arrived). So
//   1. an FFI handler never sets other ranks' promises: the rank whose handler is on the stack
//   could
//      be the one that a blocked continuation waits for. Handlers only Push. (Its own promise it
//      may set: XLA attaches the continuation after the handler has returned);
//   2. a worker that is running completions may block for good unless the others in the queue are
//      taken up. The monitor sees a queue that does not move and wakes or starts more workers, so
//      in the end every completion has a thread of its own, which is what XLA itself would use.
//
// Waking a thread costs more (5-10 us) than a small collective (1 us). A completion that is pushed
// by a worker is therefore left for that same worker, unless the site has shown that its
// continuations are long (see Wake). A loop of small collectives thus runs on one thread.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace jcoll {

class Runnable {
 public:
  virtual ~Runnable() = default;
  // Must not throw.
  virtual void Run(int index) = 0;
};

struct Task {
  std::shared_ptr<Runnable> runnable;
  int index;
};

class Executor {
 public:
  using Clock = std::chrono::steady_clock;

  // The process's pool. After a fork the child gets a fresh one (threads do not survive a fork).
  static Executor& Get();

  // Cores that this process may use; JCOLL_NUM_THREADS overrides. Set before the first Push.
  static void SetNumThreads(int num_threads);
  static int NumThreads();

  // How many sleeping (or new) workers a Push should set going.
  enum class Wake {
    kLazy,     // none from a worker thread, one from any other thread
    kCores,    // as many as there are cores: the tasks are long, and more will follow soon
    kHelpers,  // one per task, within the cores: the caller is at the same work itself
    kAll,      // one per task: the tasks have been seen to stall
  };

  // Queues runnable->Run(i) for i = first .. first + count - 1.
  void Push(const std::shared_ptr<Runnable>& runnable, int first, int count, Wake wake);
  void Push(std::vector<Task> tasks, Wake wake);

  // Something with a deadline has begun: calls `scan` about every 20 ms until it returns false.
  using Scan = bool (*)(Clock::time_point now);
  void WatchDeadlines(Scan scan);

  // For the end of the process: waits until what is queued has run and the threads have left, at
  // most 2 s. Later pushes and deadlines are served all the same, by threads that leave when idle:
  // XLA may wait for a program in flight at any moment before the process is gone.
  void Stop();

  // Counts for tests: threads alive now, and stalls that the monitor resolved.
  int num_alive();
  int64_t num_stalls() const { return num_stalls_.load(std::memory_order_relaxed); }

 private:
  Executor();
  void WorkerLoop();
  void MonitorLoop();
  bool SleepLocked(std::unique_lock<std::mutex>* lock);
  void ScanDeadlines(Clock::time_point now);
  void AfterPush(std::unique_lock<std::mutex>* lock, int count, Wake wake);
  void WakeLocked(int count);
  void RunQueue(std::unique_lock<std::mutex>* lock);
  bool SpinForMore(std::unique_lock<std::mutex>* lock);
  int HaveIdleLocked(int count);
  bool StartWorkerLocked();
  void StartMonitorLocked();
  void ResolveStallLocked();

  std::mutex mu_;
  std::condition_variable work_cv_;
  std::condition_variable monitor_cv_;
  std::condition_variable exit_cv_;
  std::deque<Task> queue_;
  int num_workers_ = 0;
  int num_idle_ = 0;
  int num_spinning_ = 0;            // Workers that look for tasks without sleeping.
  bool may_spin_ = false;           // The last tasks were long, and more will follow soon.
  std::atomic<int> num_queued_{0};  // The length of the queue, for those that spin.
  uint64_t num_popped_ = 0;
  uint64_t popped_at_last_tick_ = 0;
  bool queued_at_last_tick_ = false;
  bool monitor_running_ = false;
  bool monitor_asleep_ = false;
  bool stopping_ = false;
  std::atomic<Scan> scan_{nullptr};  // Null: no deadline is being watched.
  std::atomic<int64_t> num_stalls_{0};
};

}  // namespace jcoll
