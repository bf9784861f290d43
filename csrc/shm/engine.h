// The progress thread: goes on with collectives over several processes whose peers were not there
// yet, and looks for peers that never will be. It spins for a short while, then sleeps on the
// doorbell of its process; without collectives it does not run. Where the system has no thread to
// give, who brings the first collective is the progress thread until there is none left.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace jcoll {

class RemoteTask {
 public:
  virtual ~RemoteTask() = default;
  // Goes on without waiting, and looks for lost peers if `check`. Returns true when it is over.
  virtual bool AdvanceRemote(bool check, int64_t now_ns) = 0;
  // Whether the last call moved anything.
  virtual bool RemoteMoved() const = 0;
};

class RemoteEngine {
 public:
  static RemoteEngine& Get();
  void Add(std::shared_ptr<RemoteTask> task);

 private:
  RemoteEngine() = default;
  enum class News { kNone, kSome, kOver };
  bool StartThread();
  // `returns`: when there is nothing left to do.
  void Loop(bool returns);
  bool HasNew();
  News TakeNew(bool returns);
  bool AdvanceAll(bool check, int64_t now_ns);

  std::mutex mu_;
  std::condition_variable cv_;
  std::vector<std::shared_ptr<RemoteTask>> new_;
  bool running_ = false;

  std::vector<std::shared_ptr<RemoteTask>> active_;  // Of the thread in Loop alone.
};

}  // namespace jcoll
