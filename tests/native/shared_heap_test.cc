#include "csrc/heap/shared_heap.h"

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
  map.Give(40);
  EXPECT_EQ(map.Take(10), 40);
  map.Give(0);
  map.Give(50);
  EXPECT_EQ(map.Take(30), 0);  // The smallest hole that is large enough.
  EXPECT_EQ(map.used(), 40);
}

TEST(NeighbouringHolesAreOne) {
  for (const std::vector<int64_t>& order :
       {std::vector<int64_t>{0, 10, 20}, {20, 10, 0}, {0, 20, 10}, {10, 0, 20}}) {
    BlockMap map(30);
    for (int i = 0; i < 3; ++i) map.Take(10);
    BlockMap::Range hole;
    for (int64_t offset : order) hole = map.Give(offset);
    EXPECT_EQ(hole.offset, 0);
    EXPECT_EQ(hole.nbytes, 30);
    EXPECT_EQ(map.kept(), 30);
    map.Empty(0);
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
      map.Give(block->first);
      blocks.erase(block);
    }
    int64_t used = 0;
    for (const auto& [offset, nbytes] : blocks) used += nbytes;
    EXPECT_EQ(map.used(), used);
    EXPECT(map.kept() >= 0 && map.kept() + used <= kNbytes);
  }
  for (const auto& [offset, nbytes] : blocks) map.Give(offset);
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
  std::vector<void*> blocks;
  for (int i = 0; i < 5; ++i) {
    blocks.push_back(heap.Allocate(100 * kMiB));
    std::memset(blocks.back(), 1, 100 * kMiB);
  }
  EXPECT(SharedMemory() >= 500 * 1024);
  for (void* p : blocks) heap.Free(p);
  EXPECT(SharedMemory() <= SharedHeap::kSlack / 1024);
  char* again = static_cast<char*>(heap.Allocate(300 * kMiB));
  std::memset(again, 2, 300 * kMiB);
  EXPECT_EQ(again[150 * kMiB], 2);
  heap.Free(again);
}

TEST(MoreThanThereIs) {
  SharedHeap& heap = SharedHeap::Get();
  EXPECT(heap.Allocate(heap.range()->nbytes) != nullptr);  // Addresses, as nobody touches it.
  EXPECT(heap.Allocate(1) == nullptr);
  EXPECT(heap.Allocate(SIZE_MAX) == nullptr);
  heap.Free(heap.range()->base);
  void* p = heap.Allocate(1);
  EXPECT_EQ(p, heap.range()->base);
  EXPECT(SharedHeap::Has(p) && !SharedHeap::Has(&p));
  EXPECT_EQ(heap.NbytesOf(p), static_cast<size_t>(SharedHeap::kPageNbytes));
  heap.Free(p);
}

// What a child of a fork does with its parent's memory is its own affair.
TEST(Forks) {
  SharedHeap& heap = SharedHeap::Get();
  char* p = static_cast<char*>(heap.Allocate(kMiB));
  std::memset(p, 1, kMiB);
  const pid_t child = fork();
  if (child == 0) {
    bool is_right = p[0] == 1 && p[kMiB - 1] == 1;
    std::memset(p, 2, kMiB);
    is_right &= p[5] == 2 && heap.Allocate(kMiB) == nullptr;
    heap.Free(p);
    _exit(is_right ? 0 : 1);
  }
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT(p[0] == 1 && p[kMiB - 1] == 1);
  EXPECT(heap.Allocate(kMiB) != p);
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
