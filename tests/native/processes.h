// What the tests of collectives over several processes share: the processes, forked before any
// thread exists, and one rank's part of an all_reduce.
#ifndef JCOLL_TESTS_NATIVE_PROCESSES_H_
#define JCOLL_TESTS_NATIVE_PROCESSES_H_

#include <sys/wait.h>
#include <unistd.h>

#include <numeric>

#include "csrc/heap/shared_heap.h"
#include "csrc/shm/world.h"
#include "csrc/site.h"
#include "tests/native/ranks.h"

namespace processes {

using jcoll::Description;
using jcoll::ProcessInfo;
using jcoll::Site;
using jcoll::World;
using ranks::AllReduce;
using ranks::Watchdog;

constexpr int64_t kArenaNbytes = 8 << 20;
constexpr int kDied = -1;

inline void ReadAll(int fd, void* data, size_t nbytes) {
  EXPECT_EQ(read(fd, data, nbytes), static_cast<ssize_t>(nbytes));
}
inline void WriteAll(int fd, const void* data, size_t nbytes) {
  EXPECT_EQ(write(fd, data, nbytes), static_cast<ssize_t>(nbytes));
}

// Where the ranks' buffers are, by process.
enum class Buffers { kInHeap, kOutside, kInHeapOfEven };
inline bool g_in_heap = false;

// An allocator: of the shared heap if this process has one.
template <typename T>
struct Memory {
  using value_type = T;
  Memory() = default;
  template <typename U>
  Memory(const Memory<U>&) {}
  T* allocate(size_t n) {
    void* p = g_in_heap ? jcoll::SharedHeap::Get().Allocate(n * sizeof(T) + 1) : nullptr;
    return static_cast<T*>(p != nullptr ? p : ::operator new(n * sizeof(T)));
  }
  void deallocate(T* p, size_t) {
    jcoll::SharedHeap::Has(p) ? jcoll::SharedHeap::Get().Free(p) : ::operator delete(p);
  }
  bool operator==(const Memory&) const { return true; }
  bool operator!=(const Memory&) const { return false; }
};

// Runs fn(process) in num_processes processes that have joined one World. Returns their exit
// statuses, kDied for a signal. Introductions travel through the parent, as over JAX's store;
// nobody begins before all have joined. This process has no other thread when it forks: sanitizers
// insist.
inline std::vector<int> InProcesses(int num_processes, const std::function<void(int)>& fn,
                                    int64_t arena_nbytes = kArenaNbytes, int64_t peer_reads = 1,
                                    Buffers buffers = Buffers::kOutside) {
  struct Child {
    pid_t pid;
    int up[2], down[2];
  };
  std::vector<Child> children(num_processes);
  std::fflush(nullptr);
  for (int p = 0; p < num_processes; ++p) {
    Child& c = children[p];
    EXPECT(pipe(c.up) == 0 && pipe(c.down) == 0);
    c.pid = fork();
    if (c.pid != 0) continue;
    check::failures = 0;
    Watchdog* watchdog = new Watchdog(std::chrono::seconds(60));
    (void)watchdog;
    World::SetPeerReads(peer_reads);
    g_in_heap = buffers == Buffers::kInHeap || (buffers == Buffers::kInHeapOfEven && p % 2 == 0);
    if (g_in_heap) World::SetHeap(jcoll::SharedHeap::Get().range());
    ProcessInfo own;
    EXPECT(!World::Prepare(arena_nbytes, &own));
    own.id = p;
    WriteAll(c.up[1], &own, sizeof(own));
    std::vector<ProcessInfo> infos(num_processes);
    ReadAll(c.down[0], infos.data(), infos.size() * sizeof(ProcessInfo));
    EXPECT(!World::Join(p, infos));
    char go = 0;
    WriteAll(c.up[1], &go, 1);
    ReadAll(c.down[0], &go, 1);
    fn(p);
    _exit(check::failures == 0 ? 0 : 99);
  }
  Watchdog watchdog;
  std::vector<ProcessInfo> infos(num_processes);
  for (int p = 0; p < num_processes; ++p) {
    ReadAll(children[p].up[0], &infos[p], sizeof(ProcessInfo));
  }
  for (Child& c : children) {
    WriteAll(c.down[1], infos.data(), infos.size() * sizeof(ProcessInfo));
  }
  char go = 0;
  for (Child& c : children) ReadAll(c.up[0], &go, 1);
  for (Child& c : children) WriteAll(c.down[1], &go, 1);
  std::vector<int> ends;
  for (Child& c : children) {
    int status = 0;
    EXPECT_EQ(waitpid(c.pid, &status, 0), c.pid);
    ends.push_back(WIFEXITED(status) ? WEXITSTATUS(status) : kDied);
    for (int fd : {c.up[0], c.up[1], c.down[0], c.down[1]}) close(fd);
  }
  return ends;
}

inline std::vector<int> Zeros(int n) { return std::vector<int>(n, 0); }

// An all_reduce of `count` int32 over ranks of which `per_process` live in each process.
inline Description Remote(int num_processes, int per_process, int64_t count,
                          const char* call_site) {
  Description d = AllReduce(num_processes * per_process, count, call_site);
  for (int rank = 0; rank < num_processes * per_process; ++rank) {
    d.process_of.push_back(rank / per_process);
  }
  d.program = "shm_test";
  return d;
}

// As loading a program leaves it.
inline Description Loaded(Description d) {
  d.MakeRemote();
  return d;
}

// One rank's part; "" or the error.
struct Call {
  explicit Call(int64_t count, int value) : in(count), out(count, -1) {
    std::iota(in.begin(), in.end(), value);
  }
  void Arrive(Site* site, int64_t run, int rank) {
    jcoll::RankBuffers b;
    b.inputs[0] = in.data();
    b.outputs[0] = out.data();
    site->Arrive(run, rank, b, outcome.Of(0));
  }
  std::vector<int, Memory<int>> in, out;
  ranks::Outcome outcome{1};
};

inline std::string RunOnce(Site* site, int64_t run, int rank, int num_ranks, int64_t count) {
  Call call(count, 100 * rank);
  call.Arrive(site, run, rank);
  const std::string error = call.outcome.Error(0);
  if (error.empty()) {
    for (int64_t i = 0; i < count; ++i) {
      if (call.out[i] == num_ranks * i + 50 * num_ranks * (num_ranks - 1)) continue;
      EXPECT_EQ(call.out[i], num_ranks * i + 50 * num_ranks * (num_ranks - 1));
      break;
    }
  }
  return error;
}

}  // namespace processes

#endif  // JCOLL_TESTS_NATIVE_PROCESSES_H_
