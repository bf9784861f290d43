// Collectives over several processes, which are forked here before any thread exists.
#include <cerrno>
#include <csignal>
#include <cstring>
#include <numeric>

#include "csrc/metrics.h"
#include "csrc/plan_store.h"
#include "csrc/shm/peer_reads.h"
#include "tests/native/processes.h"

namespace {

using jcoll::Description;
using jcoll::Site;
using jcoll::World;
using processes::Buffers;
using processes::Call;
using processes::InProcesses;
using processes::kArenaNbytes;
using processes::kDied;
using processes::Loaded;
using processes::Remote;
using processes::RunOnce;
using processes::Zeros;
using std::chrono::milliseconds;

struct Where {
  int64_t peer_reads;
  Buffers buffers;
};

// Through staging areas, in the peers' memory, and in their heaps, where not all may have one.
TEST(SumsOfAllSizes) {
  for (const auto& [peer_reads, buffers] :
       {Where{0, Buffers::kOutside}, Where{0, Buffers::kInHeap}, Where{1, Buffers::kOutside},
        Where{1, Buffers::kInHeap}, Where{1, Buffers::kInHeapOfEven}}) {
    for (int n : {2, 3}) {
      EXPECT(InProcesses(
                 n,
                 [n](int process) {
                   int64_t ordinal = 0;
                   for (int64_t count : {0, 1, 7, 1000, 200003}) {
                     Description d = Remote(n, 1, count, "shm_test.cc:1");
                     d.ordinal = ordinal++;
                     Site site(Loaded(d));
                     for (int run = 0; run < 5; ++run) {
                       EXPECT_EQ(RunOnce(&site, run, process, n, count), "");
                     }
                   }
                 },
                 kArenaNbytes, peer_reads, buffers) == Zeros(n));
    }
  }
}

TEST(ReadsOfPeersMemory) {
  EXPECT(InProcesses(2, [](int process) {
           Site site(Loaded(Remote(2, 1, 1, "shm_test.cc:13")));
           const World& world = *World::Get();
           const int pid = world.PidOf(1 - process);
           EXPECT(world.ReadsPeers(0) && world.ReadsPeers(1));
           EXPECT(jcoll::ReadProbe::Try(pid, jcoll::ReadProbe::address()));
           int64_t here = 0;
           EXPECT(!jcoll::ReadPeer(pid, nullptr, &here, sizeof(here)));
           EXPECT_EQ(errno, EFAULT);
           EXPECT_EQ(RunOnce(&site, 0, process, 2, 1), "");  // The other is not to end before.
         }) == Zeros(2));
}

TEST(HeapsOfPeers) {
  EXPECT(InProcesses(
             2,
             [](int process) {
               const World& world = *World::Get();
               EXPECT(world.MapsHeaps(0) && world.MapsHeaps(1));
               std::vector<int, processes::Memory<int>> own(50000, 7 + process);
               int outside = 0;
               EXPECT(world.IsInHeap(own.data()) && !world.IsInHeap(&outside));
               const char* there = reinterpret_cast<const char*>(own.data());
               Call call(50000, 0);  // The same addresses in both, as they are forks of one.
               Site site(Loaded(Remote(2, 1, 50000, "shm_test.cc:14")));
               call.Arrive(&site, 0, process);
               EXPECT_EQ(call.outcome.Error(0), "");
               // The other's half of the operands and of the sums.
               EXPECT_EQ(jcoll::AllMetrics().back()->mapped_nbytes.load(), 2 * 25000 * 4);
               int here = 0;
               std::memcpy(&here, world.InHeapOf(1 - process, there), sizeof(here));
               EXPECT_EQ(here, 7 + 1 - process);
               EXPECT_EQ(RunOnce(&site, 1, process, 2, 50000), "");
             },
             kArenaNbytes, 1, Buffers::kInHeap) == Zeros(2));
}

TEST(ManySmallOnes) {
  EXPECT(InProcesses(2, [](int process) {
           Site site(Loaded(Remote(2, 1, 16, "shm_test.cc:2")));
           for (int run = 0; run < 20000; ++run) {
             EXPECT_EQ(RunOnce(&site, run, process, 2, 16), "");
           }
         }) == Zeros(2));
}

TEST(SeveralRanksPerProcess) {
  EXPECT(InProcesses(2, [](int process) {
           Site site(Loaded(Remote(2, 3, 1000, "shm_test.cc:3")));
           for (int run = 0; run < 50; ++run) {
             ranks::OnThreads(
                 3, [&](int i) { EXPECT_EQ(RunOnce(&site, run, process * 3 + i, 6, 1000), ""); });
           }
         }) == Zeros(2));
}

// The progress thread takes over from the handler, which waits for 50 us only.
TEST(LatePeers) {
  EXPECT(InProcesses(3, [](int process) {
           Site site(Loaded(Remote(3, 1, 30000, "shm_test.cc:4")));
           for (int run = 0; run < 9; ++run) {
             if (run % 3 == process) std::this_thread::sleep_for(milliseconds(30));
             EXPECT_EQ(RunOnce(&site, run, process, 3, 30000), "");
           }
         }) == Zeros(3));
}

// Independent collectives, begun in another order by every process, all in flight at once.
TEST(AnyOrder) {
  EXPECT(InProcesses(2, [](int process) {
           std::vector<std::unique_ptr<Site>> sites;
           std::vector<std::unique_ptr<Call>> calls;
           for (int i = 0; i < 20; ++i) {
             Description d = Remote(2, 1, 500, "shm_test.cc:5");
             d.site_index = i;
             sites.push_back(std::make_unique<Site>(Loaded(d)));
             calls.push_back(std::make_unique<Call>(500, 10 * i));
           }
           for (int i = 0; i < 20; ++i) {
             const int k = process == 0 ? i : 19 - i;
             calls[k]->Arrive(sites[k].get(), 1, process);
           }
           for (int k = 0; k < 20; ++k) {
             EXPECT_EQ(calls[k]->outcome.Error(0), "");
             EXPECT_EQ(calls[k]->out[499], 2 * (10 * k + 499));
           }
         }) == Zeros(2));
}

// all_to_all_v: rank s sends s + d rows of 12 bytes to rank d.
TEST(RowsOfRunTimeCounts) {
  EXPECT(InProcesses(2, [](int process) {
           constexpr int kRanks = 4, kRows = 40, kWidth = 3;
           Description d = Remote(2, 2, 1, "shm_test.cc:10");
           d.op = "all_to_all_v";
           d.motion = jcoll::Motion::kVariable;
           d.row_nbytes = kWidth * 4;
           d.in_rows = d.out_rows = kRows;
           Site site(Loaded(d));
           for (int run = 0; run < 20; ++run) {
             ranks::OnThreads(2, [&](int i) {
               const int me = process * 2 + i;
               std::vector<int> x(kRows * kWidth), counts(kRanks), y(kRows * kWidth, -1);
               std::vector<int> received(kRanks, -1), dropped(kRanks, -1);
               std::iota(x.begin(), x.end(), 1000 * me);
               for (int dst = 0; dst < kRanks; ++dst) counts[dst] = me + dst;
               jcoll::RankBuffers b;
               b.inputs[0] = x.data();
               b.inputs[1] = counts.data();
               b.outputs[0] = y.data();
               b.outputs[1] = received.data();
               b.outputs[2] = dropped.data();
               ranks::Outcome outcome(1);
               site.Arrive(run, me, b, outcome.Of(0));
               EXPECT_EQ(outcome.Error(0), "");
               int row = 0;
               for (int src = 0; src < kRanks; ++src) {
                 EXPECT_EQ(received[src], src + me);
                 EXPECT_EQ(dropped[src], 0);
                 // Rows for lower ranks come first: src + 0, src + 1, ..., src + me - 1 of them.
                 const int first = src * me + me * (me - 1) / 2;
                 for (int k = 0; k < (src + me) * kWidth; ++k) {
                   EXPECT_EQ(y[row * kWidth + k], 1000 * src + first * kWidth + k);
                 }
                 row += src + me;
               }
               for (int k = row * kWidth; k < kRows * kWidth; ++k) EXPECT_EQ(y[k], 0);
             });
           }
         }) == Zeros(2));
}

TEST(RanksThatDisagree) {
  EXPECT(InProcesses(3, [](int process) {
           Description d = Remote(3, 1, 8, process == 1 ? "b.py:2" : "a.py:1");
           if (process == 1) d.reduce_op = jcoll::ReduceOp::kMax;
           Site site(Loaded(d));
           const std::string error = RunOnce(&site, 1, process, 3, 8);
           EXPECT_CONTAINS(error, "the ranks do not make the same call");
           EXPECT_CONTAINS(error, ", sum, direct) called at a.py:1");
           EXPECT_CONTAINS(error, ", max, direct) called at b.py:2");
           // And on they go.
           Description good = Remote(3, 1, 8, "c.py:3");
           good.site_index = 1;
           Site next(Loaded(good));
           EXPECT_EQ(RunOnce(&next, 1, process, 3, 8), "");
         }) == Zeros(3));
}

TEST(APeerThatDies) {
  const std::vector<int> ends = InProcesses(3, [](int process) {
    Site site(Loaded(Remote(3, 1, 64, "shm_test.cc:6")));
    EXPECT_EQ(RunOnce(&site, 1, process, 3, 64), "");
    if (process == 1) kill(getpid(), SIGKILL);
    const auto start = std::chrono::steady_clock::now();
    const std::string error = RunOnce(&site, 2, process, 3, 64);
    EXPECT_CONTAINS(error, "rank 1 (process 1) will not come: process 1 (pid ");
    EXPECT(std::chrono::steady_clock::now() - start < std::chrono::seconds(2));
  });
  EXPECT(ends == (std::vector<int>{0, kDied, 0}));
}

// Whatever it was doing: the others never take a result for right that is not.
TEST(APeerThatDiesWhileItIsRead) {
  static constexpr int64_t kCount = 1 << 20;
  const auto run = [](int process, int ms) {
    Site site(Loaded(Remote(3, 1, kCount, "shm_test.cc:12")));
    EXPECT_EQ(RunOnce(&site, 0, process, 3, kCount), "");
    std::thread killer([&] {
      if (process != 1) return;
      std::this_thread::sleep_for(milliseconds(ms));
      kill(getpid(), SIGKILL);
    });
    std::string error;
    for (int run = 1; error.empty(); ++run) error = RunOnce(&site, run, process, 3, kCount);
    EXPECT_CONTAINS(error, "will not come: process 1 (pid ");
    killer.join();
  };
  for (Buffers buffers : {Buffers::kOutside, Buffers::kInHeap}) {
    for (int ms : {1, 5, 20}) {
      const std::vector<int> ends = InProcesses(
          3, [&](int process) { run(process, ms); }, kArenaNbytes, /*peer_reads=*/1, buffers);
      EXPECT(ends == (std::vector<int>{0, kDied, 0}));
    }
  }
}

TEST(APeerThatLeaves) {
  EXPECT(InProcesses(2, [](int process) {
           Site site(Loaded(Remote(2, 1, 64, "shm_test.cc:7")));
           if (process == 1) return World::Get()->Leave("ValueError: a bug");
           EXPECT_CONTAINS(RunOnce(&site, 1, process, 2, 64),
                           "process 1 has left (ValueError: a bug)");
         }) == Zeros(2));
}

TEST(APeerThatDoesNotCome) {
  EXPECT(InProcesses(2, [](int process) {
           Description d = Remote(2, 1, 64, "shm_test.cc:8");
           d.timeout_s = 0.3;
           Site site(Loaded(d));
           if (process == 1) std::this_thread::sleep_for(milliseconds(600));
           const std::string error = RunOnce(&site, 1, process, 2, 64);
           EXPECT_CONTAINS(error,
                           "timed out after 0.3 s: arrived: rank 0 (process 0); missing: "
                           "rank 1 (process 1)");
         }) == Zeros(2));
}

// More in flight than staging areas fit: they take turns, and nothing is lost or left behind.
TEST(TurnsAtSharedMemory) {
  // Each takes a little more than 1 MiB.
  static constexpr int kSites = 6, kCount = 200003;
  EXPECT(InProcesses(
             2,
             [](int process) {
               std::vector<std::unique_ptr<Site>> sites;
               for (int i = 0; i < kSites; ++i) {
                 Description d = Remote(2, 1, kCount, "shm_test.cc:11");
                 d.site_index = i;
                 sites.push_back(std::make_unique<Site>(Loaded(d)));
               }
               for (int run = 0; run < 5; ++run) {
                 std::vector<std::unique_ptr<Call>> calls;
                 if (process == 1) std::this_thread::sleep_for(milliseconds(20));
                 for (int i = 0; i < kSites; ++i) {
                   calls.push_back(std::make_unique<Call>(int64_t{kCount}, i));
                   calls[i]->Arrive(sites[i].get(), run, process);
                 }
                 for (int i = 0; i < kSites; ++i) {
                   EXPECT_EQ(calls[i]->outcome.Error(0), "");
                   EXPECT_EQ(calls[i]->out[kCount - 1], 2 * (i + kCount - 1));
                 }
               }
             },
             /*arena_nbytes=*/2 << 20) == Zeros(2));
}

TEST(NoSharedMemoryLeft) {
  EXPECT(InProcesses(
             2,
             [](int process) {
               Site site(Loaded(Remote(2, 1, 100000, "shm_test.cc:9")));
               EXPECT_CONTAINS(RunOnce(&site, 1, process, 2, 100000), "JCOLL_SHM_SIZE");
             },
             /*arena_nbytes=*/4096) == Zeros(2));
}

}  // namespace
