// A GPU per rank, emulated by threads of this process: what tests use to run kernels, to disturb
// them, and to see what they moved. The kernels' side is language.h.
//
// Nothing in here makes one rank's threads wait for another's, nor do they share a lock: all order
// between ranks is the kernels' own, and where it is missing ThreadSanitizer says so.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "cuda/emulator/runtime_types.h"

namespace jcoll::emulator {

struct Options {
  // What a launch gets, whatever it asks for.
  int threads_per_block = 4;
  // Not 0: a block believes to have so many, and those that run are its first ones and its last
  // ones, half of threads_per_block each. Of a long range a kernel then works on a few places, far
  // apart, and what is between them is not touched.
  uint32_t threads_believed = 0;
  // Not 0: every thread of every block of every rank is delayed at random steps, by at most so
  // long.
  uint32_t delay_seed = 0;
  int max_delay_us = 50;
};
// For launches from now on. Only while nothing runs.
void SetOptions(const Options& options);

// Block `block` of `rank` ends at its step number `step` of the next launch: all of its threads do,
// as soon as they get to a step. Nothing by default; rank -1 takes it back. Only while nothing
// runs.
void StopBlock(int rank, int block, int64_t step);
// The same, but the block only waits there until LetGo, which may be called at any time. One block.
void HoldBlock(int rank, int block, int64_t step);
void LetGo();

struct Traffic {
  int64_t loaded = 0, stored = 0;  // Bytes.
};
// Of the data that the threads of `rank` read from and wrote to other ranks' buffers since the last
// reset. Signals are not data.
Traffic TrafficOf(int rank);
void ResetTraffic();

// Memory of one rank, zeroed. Exactly so many bytes from the heap, so that AddressSanitizer sees
// accesses outside; the address is `misalignment` past a multiple of 16.
class Buffer {
 public:
  Buffer(int rank, int64_t nbytes, int misalignment = 0);
  ~Buffer();
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  void* data() const { return data_; }
  int64_t nbytes() const { return nbytes_; }

 private:
  std::unique_ptr<char[]> memory_;
  char* data_;
  int64_t nbytes_;
};

// An address that stands for the same offset in one buffer of each rank.
class Multicast {
 public:
  Multicast(std::vector<void*> replicas, int64_t nbytes);
  ~Multicast();
  Multicast(const Multicast&) = delete;
  Multicast& operator=(const Multicast&) = delete;
  // As misaligned as the replicas, which must agree in that.
  void* address() const { return address_; }

 private:
  std::vector<void*> replicas_;
  const size_t reserved_nbytes_;
  void* reserved_;  // Addresses without memory.
  void* address_;
};

struct Launch;  // One kernel launch under way.

}  // namespace jcoll::emulator

// A stream of one rank's GPU.
struct CUstream_st {
 public:
  explicit CUstream_st(int rank);
  ~CUstream_st();
  CUstream_st(const CUstream_st&) = delete;
  CUstream_st& operator=(const CUstream_st&) = delete;

  // Runs `thread_body` once for each thread of each block, all at once, after what is in the
  // stream.
  void Enqueue(int num_blocks, std::function<void()> thread_body);
  void Synchronize();

 private:
  void Drive();
  void Work(int slot);

  const int rank_;
  std::mutex mutex_;
  std::condition_variable changed_;   // For the driver and for Synchronize.
  std::condition_variable launched_;  // For the workers.
  std::deque<std::unique_ptr<jcoll::emulator::Launch>> queue_;
  jcoll::emulator::Launch* running_ = nullptr;
  uint64_t num_launches_ = 0;
  int num_busy_ = 0;  // Threads of the running launch that have not ended.
  bool closing_ = false;
  std::vector<std::thread> workers_;  // One per thread of the largest launch so far.
  std::thread driver_;
};

namespace jcoll::emulator {
using Stream = CUstream_st;
}
