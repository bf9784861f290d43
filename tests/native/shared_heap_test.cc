#include "csrc/heap/shared_heap.h"

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <random>
#include <thread>
#include <vector>

#include "check.h"

namespace {

using jcoll::BlockMap;
using jcoll::SharedHeap;

constexpr int64_t kMiB = 1 << 20;

TEST(BlocksComeBackToTheirPlaces) {
  BlockMap map(100);
  EXPECT_EQ(map.Take(40), 0);
  EXPECT_EQ(map.Take(10), 40);
  EXPECT_EQ(map.Take(51), -1);
  EXPECT_EQ(map.Take(50), 50);
  EXPECT(map.Give(40) && !map.Give(40) && !map.Give(41));
  EXPECT_EQ(map.NbytesOf(40), -1);
  EXPECT_EQ(map.Take(10), 40);
  EXPECT(map.Give(0) && map.Give(50));
  EXPECT_EQ(map.Take(30), 0);  // The smallest hole that is large enough.
  EXPECT_EQ(map.used(), 40);
}

TEST(PagesThatAreThereComeFirst) {
  BlockMap map(100);
  EXPECT_EQ(map.Take(30), 0);
  EXPECT_EQ(map.Take(10), 30);
  EXPECT(map.Give(0));
  EXPECT_EQ(map.kept(), 30);
  EXPECT_EQ(map.Take(60), 40);  // Never used.
  EXPECT(map.Give(40));
  EXPECT_EQ(map.Take(50), 40);
  const auto emptied = map.Empty();
  EXPECT(emptied && emptied->offset == 0 && emptied->nbytes == 30);
  EXPECT_EQ(map.kept(), 10);
  EXPECT_EQ(map.Take(10), 90);
  EXPECT_EQ(map.Take(30), 0);
  EXPECT(!map.Empty());
}

TEST(NeighbouringHolesAreOne) {
  for (const std::vector<int64_t>& order :
       {std::vector<int64_t>{0, 10, 20}, {20, 10, 0}, {0, 20, 10}, {10, 0, 20}}) {
    BlockMap map(30);
    for (int i = 0; i < 3; ++i) map.Take(10);
    for (int64_t offset : order) EXPECT(map.Give(offset));
    EXPECT_EQ(map.kept(), 30);
    EXPECT_EQ(map.Take(30), 0);
    EXPECT(map.Give(0));
    const auto emptied = map.Empty();
    EXPECT(emptied && emptied->offset == 0 && emptied->nbytes == 30);
    EXPECT_EQ(map.kept(), 0);
    EXPECT_EQ(map.Take(30), 0);
  }
}

// Against a list of all bytes.
TEST(NoTwoBlocksOverlap) {
  constexpr int64_t kNbytes = 500;
  BlockMap map(kNbytes);
  std::map<int64_t, int64_t> blocks;
  std::mt19937 random(7);
  for (int step = 0; step < 20000; ++step) {
    if (random() % 2 == 0) {
      const int64_t nbytes = 1 + random() % 60;
      const int64_t offset = map.Take(nbytes);
      if (offset < 0) continue;
      EXPECT(offset + nbytes <= kNbytes);
      const auto next = blocks.lower_bound(offset);
      EXPECT(next == blocks.end() || offset + nbytes <= next->first);
      EXPECT(next == blocks.begin() || std::prev(next)->first + std::prev(next)->second <= offset);
      EXPECT_EQ(map.NbytesOf(offset), nbytes);
      blocks[offset] = nbytes;
    } else if (!blocks.empty()) {
      const auto block = std::next(blocks.begin(), random() % blocks.size());
      EXPECT(map.Give(block->first));
      blocks.erase(block);
      if (random() % 8 == 0) map.Empty();
    }
    int64_t used = 0;
    for (const auto& [offset, nbytes] : blocks) used += nbytes;
    EXPECT_EQ(map.used(), used);
    EXPECT(map.kept() >= 0 && map.kept() + used <= kNbytes);
  }
  for (const auto& [offset, nbytes] : blocks) EXPECT(map.Give(offset));
  while (map.Empty()) {
  }
  EXPECT_EQ(map.Take(kNbytes), 0);
}

// In kB, of this process.
int64_t SharedMemory() {
  std::FILE* f = std::fopen("/proc/self/status", "r");
  char line[200];
  long kb = -1;
  while (std::fgets(line, sizeof(line), f) != nullptr) {
    if (std::sscanf(line, "RssShmem: %ld", &kb) == 1) break;
  }
  std::fclose(f);
  return kb;
}

TEST(MemoryGoesBackToTheSystem) {
  SharedHeap& heap = SharedHeap::Get();
  EXPECT(heap.range() != nullptr);
  std::vector<void*> large, small;  // The small ones keep the large ones' holes apart.
  for (int i = 0; i < 5; ++i) {
    large.push_back(heap.Allocate(100 * kMiB));
    std::memset(large.back(), 1, 100 * kMiB);
    small.push_back(heap.Allocate(1));
  }
  EXPECT(SharedMemory() >= 500 * 1024);
  for (void* p : large) heap.Free(p);
  EXPECT(SharedMemory() >= 500 * 1024);  // There may be another such step.
  std::this_thread::sleep_for(2 * SharedHeap::kWindow + std::chrono::milliseconds(100));
  heap.Free(heap.Allocate(1));
  EXPECT(SharedMemory() <= SharedHeap::kSlack / 1024);
  for (int i = 0; i < 100; ++i) {  // What a program needs again and again stays.
    char* again = static_cast<char*>(heap.Allocate(300 * kMiB));
    if (i == 0) std::memset(again, 2, 300 * kMiB);
    EXPECT_EQ(again[150 * kMiB], 2);
    heap.Free(again);
    EXPECT(SharedMemory() >= 300 * 1024);
  }
  for (void* p : small) heap.Free(p);
}

TEST(MoreThanThereIs) {
  SharedHeap& heap = SharedHeap::Get();
  EXPECT(heap.Allocate(heap.range()->nbytes + 1) == nullptr);
  EXPECT(heap.Allocate(SIZE_MAX) == nullptr);
  void* p = heap.Allocate(1);
  EXPECT(SharedHeap::Has(p) && !SharedHeap::Has(&p));
  EXPECT_EQ(heap.NbytesOf(p), static_cast<size_t>(SharedHeap::PageNbytes()));
  void* rest = heap.Allocate(heap.range()->nbytes / 2);  // Addresses, as nobody touches it.
  EXPECT(rest != nullptr && heap.Allocate(heap.range()->nbytes / 2) == nullptr);
  heap.Free(rest);
  heap.Free(p);
}

// A child of a fork goes on without the heap, and dies if it looks into it.
TEST(Forks) {
  SharedHeap& heap = SharedHeap::Get();
  char* p = static_cast<char*>(heap.Allocate(kMiB));
  std::memset(p, 1, kMiB);
  for (const bool looks : {false, true}) {
    const pid_t child = fork();
    if (child == 0) {
      heap.Free(p);
      const bool is_right = heap.range() == nullptr && heap.Allocate(kMiB) == nullptr;
      if (looks) p[5] = 2;
      _exit(is_right ? 42 : 43);
    }
    int status = 0;
    EXPECT_EQ(waitpid(child, &status, 0), child);
    const int code = WIFEXITED(status) ? WEXITSTATUS(status) : 0;  // A sanitizer's own, perhaps.
    EXPECT(looks ? code != 42 && code != 43 : code == 42);
  }
  EXPECT(p[0] == 1 && p[5] == 1 && p[kMiB - 1] == 1);
  EXPECT(heap.Allocate(kMiB) != p);
}

// In a process of its own, before it has a heap.
template <typename Fn>
void ExpectInChild(Fn fn, bool survives) {
  const pid_t child = fork();
  if (child == 0) _exit(fn() ? 0 : 1);
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status == 0, survives);
}

TEST(Limits) {
  for (const auto which : {RLIMIT_FSIZE, RLIMIT_AS}) {
    ExpectInChild(
        [which] {
          rlimit limit{1 << 30, 1 << 30};
          SharedHeap heap;
          if (heap.range() == nullptr || setrlimit(which, &limit) != 0) return false;
          SharedHeap limited;
          return limited.range() == nullptr && limited.Allocate(1) == nullptr;
        },
        true);
  }
}

TEST(WhatIsNoBlock) {
  SharedHeap& heap = SharedHeap::Get();
  char* p = static_cast<char*>(heap.Allocate(kMiB));
  EXPECT_EQ(heap.NbytesOf(p), static_cast<size_t>(kMiB));
  ExpectInChild(
      [] {
        SharedHeap own;
        own.Free(static_cast<char*>(own.Allocate(kMiB)) + 64);
        return true;
      },
      false);
  heap.Free(p);
}

TEST(ManyThreads) {
  SharedHeap& heap = SharedHeap::Get();
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&heap, t] {
      for (int i = 0; i < 2000; ++i) {
        const size_t nbytes = 1 + (i * 7919 + t) % 100000;
        char* p = static_cast<char*>(heap.Allocate(nbytes));
        std::memset(p, t, nbytes);
        EXPECT(p[0] == t && p[nbytes - 1] == t);
        heap.Free(p);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
