#include "cuda/emulator/emulator.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <new>
#include <random>

#include "cuda/emulator/language.h"

namespace jcoll::emulator {
namespace {

constexpr int kMaxRanks = 128;

// Unwinds a thread whose block has been stopped.
struct Stopped {};

// __syncthreads of one block, which also combines a predicate. A stopped block waits for nobody.
class BlockBarrier {
 public:
  void Reset(int num_threads) { num_threads_ = num_threads; }

  bool Wait(bool predicate) {
    std::unique_lock<std::mutex> lock(mutex_);
    const uint64_t generation = generation_;
    any_[generation % 2] |= predicate;
    if (++arrived_ == num_threads_) {
      arrived_ = 0;
      any_[(generation + 1) % 2] = false;
      ++generation_;
      changed_.notify_all();
    } else {
      changed_.wait(lock, [&] { return generation_ != generation || stopped_; });
      if (generation_ == generation) throw Stopped();
    }
    return any_[generation % 2];
  }

  void Stop() {
    std::lock_guard<std::mutex> lock(mutex_);
    stopped_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int num_threads_ = 0, arrived_ = 0;
  uint64_t generation_ = 0;
  bool any_[2] = {false, false};
  bool stopped_ = false;
};

// Where a block is held.
class Gate {
 public:
  void Close() { Set(false); }
  void Open() { Set(true); }
  void Pass() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return open_; });
  }

 private:
  void Set(bool open) {
    std::lock_guard<std::mutex> lock(mutex_);
    open_ = open;
    changed_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = true;
};

struct Block {
  BlockBarrier barrier;
  std::atomic<int64_t> steps_left{-1};  // -1: it is not to be stopped.
  bool is_held = false;                 // Then, instead of being stopped.
};

struct Stop {
  int rank = -1, block = 0;
  int64_t step = 0;
  bool is_held = false;
};

Options current_options;
Stop next_stop;
Gate gate;

struct ThreadState {
  int rank = 0;
  Block* block = nullptr;
  std::minstd_rand random;
  bool delayed = false;
  uint32_t max_delay_us = 0;
};
thread_local ThreadState self;

// Read by the threads of kernels without a lock, which would order them; changed only while none
// runs.
struct Range {
  const char* begin;
  const char* end;
  int rank;
};
constexpr int kNobody = -1;  // What is loaded and stored there passes everybody's link.
std::vector<Range> ranges;   // By begin; disjoint.

void AddRange(const Range& range) {
  ranges.insert(std::upper_bound(ranges.begin(), ranges.end(), range,
                                 [](const Range& a, const Range& b) { return a.begin < b.begin; }),
                range);
}
void RemoveRange(const void* begin) {
  ranges.erase(std::find_if(ranges.begin(), ranges.end(),
                            [&](const Range& range) { return range.begin == begin; }));
}

struct Alias {
  const char* begin;
  const char* end;
  void* const* replicas;
  int num_ranks;
};
std::vector<Alias> aliases;

struct Counters {
  std::atomic<int64_t> loaded{0}, stored{0};
};
Counters counters[kMaxRanks];

bool IsOthers(const void* p) {
  const char* address = static_cast<const char*>(p);
  auto after = std::upper_bound(ranges.begin(), ranges.end(), address,
                                [](const char* a, const Range& range) { return a < range.begin; });
  if (after == ranges.begin()) return false;
  const Range& range = *(after - 1);
  return address < range.end && range.rank != self.rank;
}

}  // namespace

struct Launch {
  int num_blocks, num_threads;
  std::function<void()> thread_body;
  std::vector<Block> blocks;
  Options options;
  uint64_t number = 0;

  Launch(int num_blocks, std::function<void()> thread_body)
      : num_blocks(num_blocks),
        num_threads(current_options.threads_per_block),
        thread_body(std::move(thread_body)),
        blocks(num_blocks),
        options(current_options) {
    for (Block& block : blocks) block.barrier.Reset(num_threads);
  }
  int size() const { return num_blocks * num_threads; }
};

// Thread number `slot` of a launch.
void RunThread(int rank, int slot, Launch* launch) {
  const int block = slot / launch->num_threads;
  const auto thread = static_cast<uint32_t>(slot % launch->num_threads);
  const auto num_threads = static_cast<uint32_t>(launch->num_threads);
  blockDim.x = std::max(num_threads, launch->options.threads_believed);
  threadIdx.x = thread < num_threads / 2 ? thread : blockDim.x - num_threads + thread;
  blockIdx.x = static_cast<uint32_t>(block);
  gridDim.x = static_cast<uint32_t>(launch->num_blocks);
  self.rank = rank;
  self.block = &launch->blocks[block];
  self.delayed = launch->options.delay_seed != 0;
  self.max_delay_us = static_cast<uint32_t>(launch->options.max_delay_us);
  const uint32_t place[] = {launch->options.delay_seed, static_cast<uint32_t>(rank),
                            static_cast<uint32_t>(slot), static_cast<uint32_t>(launch->number)};
  std::seed_seq seed(std::begin(place), std::end(place));
  if (self.delayed) self.random.seed(seed);
  try {
    launch->thread_body();
  } catch (const Stopped&) {
  }
}

void SetOptions(const Options& options) { current_options = options; }
void StopBlock(int rank, int block, int64_t step) { next_stop = {rank, block, step, false}; }
void HoldBlock(int rank, int block, int64_t step) {
  gate.Close();
  next_stop = {rank, block, step, true};
}
void LetGo() { gate.Open(); }

Traffic TrafficOf(int rank) { return {counters[rank].loaded, counters[rank].stored}; }
void ResetTraffic() {
  for (Counters& c : counters) c.loaded = c.stored = 0;
}

void CountLoad(const void* p, int64_t nbytes) {
  if (IsOthers(p)) counters[self.rank].loaded.fetch_add(nbytes, std::memory_order_relaxed);
}
void CountStore(const void* p, int64_t nbytes) {
  if (IsOthers(p)) counters[self.rank].stored.fetch_add(nbytes, std::memory_order_relaxed);
}

void Step() {
  if (self.block->steps_left.load(std::memory_order_relaxed) >= 0 &&
      self.block->steps_left.fetch_sub(1, std::memory_order_relaxed) <= 0) {
    self.block->steps_left.store(0, std::memory_order_relaxed);
    if (!self.block->is_held) {
      self.block->barrier.Stop();
      throw Stopped();
    }
    gate.Pass();
    self.block->steps_left.store(-1, std::memory_order_relaxed);
  }
  if (!self.delayed) return;
  const uint32_t choice = self.random() % 64;
  if (choice == 0) {
    std::this_thread::sleep_for(std::chrono::microseconds(self.random() % (self.max_delay_us + 1)));
  } else if (choice < 8) {
    std::this_thread::yield();
  }
}

void Pause() {
  // There are more threads than processors, and the one that is waited for needs one.
  std::this_thread::yield();
}

Replicas Resolve(const void* multicast_address) {
  const char* address = static_cast<const char*>(multicast_address);
  for (const Alias& alias : aliases) {
    if (address < alias.begin || address >= alias.end) continue;
    return {alias.replicas, alias.num_ranks, address - alias.begin};
  }
  return {nullptr, 0, 0};
}

Buffer::Buffer(int rank, int64_t nbytes, int misalignment)
    : memory_(new char[static_cast<size_t>(nbytes + misalignment)]()),
      data_(memory_.get() + misalignment),
      nbytes_(nbytes) {
  AddRange({data_, data_ + nbytes, rank});
}
Buffer::~Buffer() { RemoveRange(data_); }

Multicast::Multicast(std::vector<void*> replicas, int64_t nbytes)
    : replicas_(std::move(replicas)), reserved_nbytes_(static_cast<size_t>(nbytes + 16)) {
  constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  reserved_ = mmap(nullptr, reserved_nbytes_, PROT_NONE, kFlags, -1, 0);
  if (reserved_ == MAP_FAILED) throw std::bad_alloc();
  address_ = static_cast<char*>(reserved_) + reinterpret_cast<uintptr_t>(replicas_[0]) % 16;
  const char* begin = static_cast<char*>(address_);
  aliases.push_back({begin, begin + nbytes, replicas_.data(), static_cast<int>(replicas_.size())});
  AddRange({begin, begin + nbytes, kNobody});
}
Multicast::~Multicast() {
  RemoveRange(address_);
  aliases.erase(std::find_if(aliases.begin(), aliases.end(),
                             [&](const Alias& alias) { return alias.begin == address_; }));
  munmap(reserved_, reserved_nbytes_);
}

}  // namespace jcoll::emulator

void __syncthreads() { __syncthreads_or(0); }
int __syncthreads_or(int predicate) {
  jcoll::emulator::Step();
  return jcoll::emulator::self.block->barrier.Wait(predicate != 0);
}

using jcoll::emulator::Launch;

CUstream_st::CUstream_st(int rank) : rank_(rank), driver_([this] { Drive(); }) {}

CUstream_st::~CUstream_st() {
  Synchronize();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closing_ = true;
    changed_.notify_all();
    launched_.notify_all();
  }
  driver_.join();
  for (std::thread& worker : workers_) worker.join();
}

void CUstream_st::Enqueue(int num_blocks, std::function<void()> thread_body) {
  auto launch = std::make_unique<Launch>(num_blocks, std::move(thread_body));
  auto& stop = jcoll::emulator::next_stop;
  if (stop.rank == rank_) {
    launch->blocks[stop.block].steps_left = stop.step;
    launch->blocks[stop.block].is_held = stop.is_held;
    stop.rank = -1;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  queue_.push_back(std::move(launch));
  changed_.notify_all();
}

void CUstream_st::Synchronize() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return queue_.empty(); });
}

void CUstream_st::Drive() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return closing_ || !queue_.empty(); });
    if (queue_.empty()) return;
    Launch* launch = queue_.front().get();
    while (static_cast<int>(workers_.size()) < launch->size()) {
      workers_.emplace_back([this, slot = static_cast<int>(workers_.size())] { Work(slot); });
    }
    launch->number = ++num_launches_;
    num_busy_ = launch->size();
    running_ = launch;
    launched_.notify_all();
    changed_.wait(lock, [&] { return num_busy_ == 0; });
    running_ = nullptr;
    queue_.pop_front();
    changed_.notify_all();
  }
}

void CUstream_st::Work(int slot) {
  uint64_t done = 0;  // Number of the last launch that this thread took part in.
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    launched_.wait(lock, [&] {
      return closing_ || (running_ && running_->number > done && slot < running_->size());
    });
    if (closing_) return;
    Launch* launch = running_;
    done = launch->number;
    lock.unlock();
    jcoll::emulator::RunThread(rank_, slot, launch);
    lock.lock();
    if (--num_busy_ == 0) changed_.notify_all();
  }
}
