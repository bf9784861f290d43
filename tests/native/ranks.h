// What the tests of the runtime share: a watchdog, buffers with guards, descriptions, completions
// that can be waited for.
#ifndef JCOLL_TESTS_NATIVE_RANKS_H_
#define JCOLL_TESTS_NATIVE_RANKS_H_

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "csrc/site.h"
#include "tests/native/check.h"

namespace ranks {

// Ends the process with an error if it lives longer than `patience`: a hang becomes a failure. The
// default is far beyond what any case takes, under a sanitizer on a busy machine too.
class Watchdog {
 public:
  explicit Watchdog(std::chrono::seconds patience = std::chrono::seconds(100))
      : thread_([this, patience] { Watch(patience); }) {}
  ~Watchdog() {
    {
      std::lock_guard<std::mutex> lock(mu_);
      done_ = true;
      cv_.notify_all();
    }
    thread_.join();
  }

 private:
  void Watch(std::chrono::seconds patience) {
    std::unique_lock<std::mutex> lock(mu_);
    if (cv_.wait_for(lock, patience, [this] { return done_; })) return;
    std::fprintf(stderr, "stuck for %d s: giving up\n", static_cast<int>(patience.count()));
    std::fflush(nullptr);
    _exit(1);
  }
  std::mutex mu_;
  std::condition_variable cv_;
  bool done_ = false;
  std::thread thread_;
};

// Counts down; waits for zero.
class Latch {
 public:
  explicit Latch(int count) : count_(count) {}
  void CountDown() {
    std::lock_guard<std::mutex> lock(mu_);
    if (--count_ <= 0) cv_.notify_all();
  }
  void Wait() {
    std::unique_lock<std::mutex> lock(mu_);
    cv_.wait(lock, [this] { return count_ <= 0; });
  }
  bool WaitFor(std::chrono::milliseconds patience) {
    std::unique_lock<std::mutex> lock(mu_);
    return cv_.wait_for(lock, patience, [this] { return count_ <= 0; });
  }

 private:
  std::mutex mu_;
  std::condition_variable cv_;
  int count_;
};

// How one collective ended, rank by rank.
class Outcome {
 public:
  explicit Outcome(int num_ranks) : ends_(num_ranks) {}

  // The completion of a rank; to be called once.
  jcoll::Completion Of(int rank) {
    return [this, rank](const jcoll::Failure* failure) {
      std::lock_guard<std::mutex> lock(mu_);
      EXPECT_EQ(++ends_[rank].times, 1);
      if (failure != nullptr) ends_[rank].error = failure->message;
      cv_.notify_all();
    };
  }
  // Waits for one rank; "" if its outputs are ready.
  std::string Error(int rank) {
    std::unique_lock<std::mutex> lock(mu_);
    cv_.wait(lock, [&] { return ends_[rank].times > 0; });
    return ends_[rank].error;
  }
  void Wait() {
    for (size_t rank = 0; rank < ends_.size(); ++rank) Error(static_cast<int>(rank));
  }
  void ExpectSuccess() {
    for (size_t rank = 0; rank < ends_.size(); ++rank) EXPECT_EQ(Error(static_cast<int>(rank)), "");
  }
  int num_done() {
    std::lock_guard<std::mutex> lock(mu_);
    int done = 0;
    for (const End& end : ends_) done += end.times > 0;
    return done;
  }

 private:
  struct End {
    int times = 0;
    std::string error;
  };
  std::mutex mu_;
  std::condition_variable cv_;
  std::vector<End> ends_;
};

// Arrives as XLA does. The rest of the rank's program is attached to its future when the handler
// has returned: true if the collective is complete by then, and the caller goes on; else `rest`
// will run on the thread that completes it.
inline bool ArriveOrThen(jcoll::Site* site, int64_t run_id, int64_t position,
                         const jcoll::RankBuffers& buffers, std::function<void()> rest) {
  auto is_second = std::make_shared<std::atomic<bool>>(false);
  site->Arrive(run_id, position, buffers, [is_second, rest](const jcoll::Failure* failure) {
    EXPECT(failure == nullptr);
    if (is_second->exchange(true)) rest();
  });
  return is_second->exchange(true);
}

// `nbytes` at `misalign` bytes past an alignment of 64, with guards on both sides.
class Buffer {
 public:
  explicit Buffer(int64_t nbytes, int misalign = 0)
      : nbytes_(nbytes), bytes_(nbytes + 3 * kGuard, kGuardByte) {
    const auto address = reinterpret_cast<uintptr_t>(bytes_.data());
    begin_ = kGuard + (64 - address % 64) % 64 + misalign;
  }
  template <typename T>
  explicit Buffer(const std::vector<T>& values, int misalign = 0)
      : Buffer(static_cast<int64_t>(values.size() * sizeof(T)), misalign) {
    if (nbytes_ > 0) std::memcpy(data(), values.data(), nbytes_);
  }
  void* data() { return bytes_.data() + begin_; }
  template <typename T>
  std::vector<T> Values() const {
    std::vector<T> values(nbytes_ / sizeof(T));
    if (nbytes_ > 0) std::memcpy(values.data(), bytes_.data() + begin_, nbytes_);
    return values;
  }
  bool GuardsAreIntact() const {
    for (int64_t i = 0; i < static_cast<int64_t>(bytes_.size()); ++i) {
      const bool inside = i >= begin_ && i < begin_ + nbytes_;
      if (!inside && bytes_[i] != kGuardByte) return false;
    }
    return true;
  }

 private:
  static constexpr int64_t kGuard = 128;
  static constexpr char kGuardByte = 0x5a;
  int64_t nbytes_;
  std::vector<char> bytes_;
  int64_t begin_;
};

// Runs fn(rank) on one thread per rank and waits for all of them.
inline void OnThreads(int num_ranks, const std::function<void(int)>& fn) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < num_ranks; ++rank) threads.emplace_back(fn, rank);
  for (std::thread& thread : threads) thread.join();
}

// An all_reduce of `count` numbers of int32 over one group of num_ranks.
inline jcoll::Description AllReduce(int num_ranks, int64_t count, const char* call_site) {
  jcoll::Description d;
  d.op = "all_reduce";
  d.axis = "'x'";
  d.algorithm = "direct";
  d.call_site = call_site;
  d.signature = "int32[" + std::to_string(count) + "]";
  d.dtype_name = "int32";
  d.dtype = jcoll::DType::kS32;
  d.axis_size = num_ranks;
  d.block_nbytes = count * 4;
  d.nbytes = count * 4;
  d.source_map.assign(num_ranks, -2);
  return d;
}

// `count` times the same number per rank, summed: one is the smallest collective that shows whether
// ranks were matched right.
struct Sum {
  explicit Sum(int num_ranks, int64_t count = 1)
      : num_ranks(num_ranks),
        count(count),
        in(num_ranks * count),
        out(num_ranks * count, -1),
        outcome(num_ranks) {}
  void Arrive(jcoll::Site* site, int64_t run_id, int rank, int value, int64_t mesh_group = 0) {
    std::fill_n(&in[rank * count], count, value);
    jcoll::RankBuffers b;
    b.inputs[0] = &in[rank * count];
    b.outputs[0] = &out[rank * count];
    site->Arrive(run_id, mesh_group * num_ranks + rank, b, outcome.Of(rank));
  }
  void Expect(int total) {
    outcome.ExpectSuccess();
    for (int y : out) EXPECT_EQ(y, total);
  }
  const int num_ranks;
  const int64_t count;
  std::vector<int> in, out;
  Outcome outcome;
};

}  // namespace ranks

#endif  // JCOLL_TESTS_NATIVE_RANKS_H_
