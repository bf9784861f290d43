// What goes wrong between processes, and what only looks like it. Where processes can be in
// trouble side by side, one job of several groups saves the waiting.
#include <pthread.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <set>
#include <thread>

#include "csrc/shm/segment.h"
#include "tests/native/processes.h"

namespace {

using jcoll::Description;
using jcoll::Key;
using jcoll::Post;
using jcoll::PostState;
using jcoll::ProcessInfo;
using jcoll::Segment;
using jcoll::Site;
using jcoll::World;
using processes::Call;
using processes::InProcesses;
using processes::kArenaNbytes;
using processes::Loaded;
using processes::Remote;
using processes::RunOnce;
using processes::Zeros;
using ranks::OnThreads;
using std::chrono::milliseconds;
using std::this_thread::sleep_for;

// An all_reduce of one number over two processes out of more; one call in a program for each
// `site_index`.
Description Pair(int first, int site_index, const char* call_site) {
  Description d = Remote(2, 1, 1, call_site);
  d.process_of = {first, first + 1};
  d.site_index = site_index;
  return d;
}

// Rows of a mesh of two axes: over processes first and first + 1, and two inside each of them.
Description Rows(int first, int site_index, const char* call_site) {
  Description d = Pair(first, site_index, call_site);
  d.process_of = {first, first + 1, first, first + 1};
  return d;
}

std::string RunRow(Site* site, int row, int rank) {
  Call call(1, 100 * rank);
  call.Arrive(site, 1, 2 * row + rank);
  return call.outcome.Error(0);
}

// A container has processes with the same numbers as another one.
TEST(AnotherProcesssMemoryIsNotTakenForAPeers) {
  EXPECT(InProcesses(1, [](int) {
           ProcessInfo own;
           EXPECT(!World::Prepare(kArenaNbytes, &own));
           ProcessInfo other = own;
           other.nonce[0] ^= 1;
           other.id = 1;
           const auto failure = World::Join(0, {own, other});
           EXPECT(failure.has_value());
           EXPECT_CONTAINS(failure->message, "what process 1 shares is not the memory of");
           EXPECT_CONTAINS(failure->message, "JCOLL_HOST_ID");
         }) == Zeros(1));
}

// What is said when so many cannot join.
std::string JoinFailure(const ProcessInfo& own, int num_processes) {
  std::vector<ProcessInfo> infos(num_processes, own);
  infos[1].fd = -1;  // Should it get so far, the second one cannot be met.
  const auto failure = World::Join(0, infos);
  EXPECT(failure.has_value());
  return failure ? failure->message : "";
}

TEST(TooManyProcessesOfOneHost) {
  EXPECT(InProcesses(1, [](int) {
           ProcessInfo own;
           EXPECT(!World::Prepare(kArenaNbytes, &own));
           const std::string refusal = JoinFailure(own, Post::kMaxProcesses + 1);
           EXPECT_CONTAINS(refusal, "513 processes of this host; at most 512 can share memory");
           EXPECT_CONTAINS(refusal,
                           "Give them several JCOLL_HOST_ID, or each process more devices");
           EXPECT_CONTAINS(JoinFailure(own, Post::kMaxProcesses), "cannot be opened");
         }) == Zeros(1));
}

// A resource of this process, less of it while this lives.
class Limit {
 public:
  Limit(int resource, rlim_t most) : resource_(resource) {
    EXPECT_EQ(getrlimit(resource, &before_), 0);
    const rlimit limit = {std::min(most, before_.rlim_max), before_.rlim_max};
    EXPECT_EQ(setrlimit(resource, &limit), 0);
  }
  ~Limit() { setrlimit(resource_, &before_); }

 private:
  const int resource_;
  rlimit before_;
};

std::string CreateFailure(int64_t nbytes) {
  Segment segment;
  const auto failure = segment.Create(nbytes);
  EXPECT(failure.has_value() && segment.data() == nullptr);
  return failure ? failure->message : "";
}

void IsRefusedMemory() {
  std::signal(SIGXFSZ, SIG_IGN);  // As Python has it: the call fails instead.
  std::string no_file, no_size;
  {
    Limit limit(RLIMIT_NOFILE, 0);
    no_file = CreateFailure(1 << 20);
  }
  {
    Limit limit(RLIMIT_FSIZE, 4096);
    no_size = CreateFailure(1 << 20);
  }
  EXPECT_CONTAINS(no_file, "no shared memory of 1048576 bytes: Too many open files.");
  EXPECT_CONTAINS(no_size, "no shared memory of 1048576 bytes: File too large.");
  EXPECT_CONTAINS(no_size, "Set JCOLL_SHM_SIZE to less, or allow the process more memory.");
  const std::string no_room = CreateFailure(int64_t{1} << 60);
  EXPECT_CONTAINS(no_room, "shared memory cannot be mapped: Cannot allocate memory.");
  EXPECT_CONTAINS(no_room, "Set JCOLL_SHM_SIZE to less.");
}

// By each of the three calls that make a segment; afterwards there is memory to be had.
TEST(MemoryThatTheSystemRefuses) {
  EXPECT(InProcesses(1, [](int) {
           IsRefusedMemory();
           ProcessInfo own;
           EXPECT(World::Prepare(int64_t{1} << 60, &own).has_value());
           EXPECT(!World::Prepare(kArenaNbytes, &own));
         }) == Zeros(1));
}

void IsLateAfterHavingWaited(int process) {
  constexpr int kCalls = 20;
  std::vector<std::unique_ptr<Site>> sites;
  std::vector<std::unique_ptr<Call>> calls;
  if (process == 1) sleep_for(milliseconds(500));
  for (int i = 0; i < kCalls; ++i) {
    sites.push_back(std::make_unique<Site>(Loaded(Pair(0, i, "shm_faults_test.cc:1"))));
    calls.push_back(std::make_unique<Call>(1, i));
    calls[i]->Arrive(sites[i].get(), 1, process);
  }
  for (auto& call : calls) EXPECT_EQ(call->outcome.Error(0), "");
  if (process == 0) sleep_for(milliseconds(1700));
  Site next(Loaded(Pair(0, kCalls, "shm_faults_test.cc:2")));
  EXPECT_EQ(RunOnce(&next, 1, process, 2, 1), "");
}

void WaitInRowsCrosswise(int process) {
  Site site(Loaded(Rows(2, 0, "shm_faults_test.cc:3")));
  OnThreads(2, [&](int row) {
    if (row != process - 2) sleep_for(milliseconds(1700));
    EXPECT_EQ(RunRow(&site, row, process - 2), "");
  });
}

// Right programs in which all wait, and use no CPU.
TEST(WhoWaitsLongIsNotTakenForAnotherCaller) {
  EXPECT(InProcesses(4, [](int process) {
           (process < 2 ? IsLateAfterHavingWaited : WaitInRowsCrosswise)(process);
         }) == Zeros(4));
}

// Both rows take another branch.
void DisagreeInTwoRows(int process) {
  Site site(Loaded(Rows(0, process, process == 0 ? "a.py:1" : "b.py:2")));
  OnThreads(2, [&](int row) {
    const std::string error = RunRow(&site, row, process);
    EXPECT_CONTAINS(error, "do not make the same call");
    EXPECT_CONTAINS(error, "called at a.py:1");
    EXPECT_CONTAINS(error, "called at b.py:2");
  });
}

// Two independent calls here, one there.
void DisagreeInNumber(int process) {
  OnThreads(process == 2 ? 2 : 1, [&](int i) {
    Site site(Loaded(Pair(2, 10 * process + i, "c.py:3")));
    EXPECT_CONTAINS(RunOnce(&site, 1, process - 2, 2, 1), "do not make the same call");
  });
}

TEST(EveryConflictIsFound) {
  EXPECT(InProcesses(4, [](int process) {
           jcoll::SetDefaultTimeout(6);
           (process < 2 ? DisagreeInTwoRows : DisagreeInNumber)(process);
           // And on they go.
           Description d = Remote(4, 1, 1, "shm_faults_test.cc:4");
           d.site_index = 50;
           Site next(Loaded(d));
           EXPECT_EQ(RunOnce(&next, 1, process, 4, 1), "");
         }) == Zeros(4));
}

// Process 1 makes a call too many, and is the first to find out: the others, which it then joins at
// once, still wait in the next one.
TEST(OneCallMore) {
  EXPECT(InProcesses(3, [](int process) {
           Description d = Remote(3, 1, 1, "shm_faults_test.cc:10");
           d.site_index = 60;
           Site extra(Loaded(d));
           d.site_index = 61;
           Site common(Loaded(d));
           if (process == 1) {
             sleep_for(milliseconds(50));
             EXPECT_CONTAINS(RunOnce(&extra, 1, 1, 3, 1), "do not make the same call");
           }
           EXPECT_CONTAINS(RunOnce(&common, 2, process, 3, 1), "do not make the same call");
           EXPECT_EQ(RunOnce(&common, 3, process, 3, 1), "");
         }) == Zeros(3));
}

// For a time, in which it cannot see that others have failed.
std::thread Stopped(int process, milliseconds from, milliseconds to) {
  return std::thread([=] {
    sleep_for(from);
    EXPECT_EQ(kill(World::Get()->PidOf(process), SIGSTOP), 0);
    sleep_for(to - from);
    EXPECT_EQ(kill(World::Get()->PidOf(process), SIGCONT), 0);
  });
}

// Some make a call too many, the last of whom is stopped then; `late` learns from another one that
// the ranks differ, and all but who was stopped are in the next call by the time that the call too
// many fails.
void OneCallMoreThatEndsLate(int process, int num_processes, const std::set<int>& extra, int late,
                             int stopper) {
  Description d = Remote(num_processes, 1, 1, "shm_faults_test.cc:11");
  d.site_index = 62;
  Site more(Loaded(d));
  d.site_index = 63;
  Site common(Loaded(d));
  const int stopped = *extra.rbegin();
  if (extra.count(process) > 0) {
    EXPECT_CONTAINS(RunOnce(&more, 1, process, num_processes, 1), "do not make the same call");
    // The others look into what they wait for meanwhile.
    if (process == stopped) sleep_for(milliseconds(700));
  }
  if (process == late) sleep_for(milliseconds(1400));
  std::thread stops;
  if (process == stopper) stops = Stopped(stopped, milliseconds(900), milliseconds(1800));
  EXPECT_CONTAINS(RunOnce(&common, 2, process, num_processes, 1), "do not make the same call");
  EXPECT_EQ(RunOnce(&common, 3, process, num_processes, 1), "");
  if (stops.joinable()) stops.join();
}

// Process 0 is the first to find out.
TEST(OneCallMoreThatEndsLate) {
  EXPECT(InProcesses(3, [](int process) {
           OneCallMoreThatEndsLate(process, 3, {1}, /*late=*/2, /*stopper=*/0);
         }) == Zeros(3));
}

// Whom process 3 meets first has been told itself.
TEST(TwoMakeOneCallMore) {
  EXPECT(InProcesses(5, [](int process) {
           OneCallMoreThatEndsLate(process, 5, {0, 4}, /*late=*/3, /*stopper=*/1);
         }) == Zeros(5));
}

// A process that computes beside is not known to wait, so that only the deadline ends its call.
TEST(AMismatchThatEndsByTheDeadline) {
  EXPECT(InProcesses(2, [](int process) {
           Description d = Remote(2, 1, 1, "shm_faults_test.cc:12");
           d.site_index = 64;
           d.timeout_s = 6;
           Site more(Loaded(d));
           d.site_index = 65;
           d.call_site = "shm_faults_test.cc:13";
           Site next(Loaded(d));
           d.site_index = 66;
           d.call_site = "shm_faults_test.cc:14";
           d.timeout_s = 1.5;
           Site common(Loaded(d));
           std::atomic<bool> is_over{false};
           std::thread computes([&] {
             while (process == 0 && !is_over) {
             }
           });
           std::thread stops;
           if (process == 0) stops = Stopped(1, milliseconds(1200), milliseconds(2200));
           if (process == 1) {
             EXPECT_CONTAINS(RunOnce(&more, 1, 1, 2, 1), "do not make the same call");
             sleep_for(milliseconds(700));
           }
           EXPECT_CONTAINS(RunOnce(&common, 2, process, 2, 1),
                           process == 0 ? "timed out after 1.5 s" : "do not make the same call");
           EXPECT_EQ(RunOnce(&next, 3, process, 2, 1), "");
           is_over = true;
           computes.join();
           if (stops.joinable()) stops.join();
         }) == Zeros(2));
}

// It says so while its part of a collective is being done on other threads.
TEST(WhoHasArrivedMayLeave) {
  EXPECT(InProcesses(3, [](int process) {
           Site site(Loaded(Remote(3, 1, 1000, "shm_faults_test.cc:5")));
           if (process == 2) sleep_for(milliseconds(200));
           Call call(1000, process);
           call.Arrive(&site, 1, process);
           if (process == 1) World::Get()->Leave("its program has ended");
           EXPECT_EQ(call.outcome.Error(0), "");
           EXPECT_EQ(call.out[999], 3 * 999 + 3);
           // What it begins now nobody can count on.
           const std::string error = RunOnce(&site, 2, process, 3, 1000);
           EXPECT_CONTAINS(error, "process 1 has left (its program has ended)");
         }) == Zeros(3));
}

// The ranks that are named are those of the process that misses one, in all processes.
TEST(ARankOfAProcessDoesNotCome) {
  EXPECT(InProcesses(2, [](int process) {
           Description d = Remote(2, 2, 1, "shm_faults_test.cc:6");
           d.timeout_s = process == 0 ? 0.2 : 5;
           Site site(Loaded(d));
           const char* words =
               "timed out after 0.2 s: 1 of 2 ranks of process 0 arrived (0); missing: 1.";
           OnThreads(process == 0 ? 1 : 2, [&](int i) {
             EXPECT_CONTAINS(RunOnce(&site, 1, 2 * process + i, 4, 1), words);
           });
         }) == Zeros(2));
}

// An arena of 1 MiB holds two collectives of this size.
constexpr int kCount = 100000;

// Process 0, for a process that does not come.
void WaitInVain() {
  Description d = Pair(1, 0, "shm_faults_test.cc:7");
  d.process_of = {0, 2};
  d.block_nbytes = 4 * kCount;
  d.timeout_s = 0.01;
  for (d.site_index = 0; d.site_index < 8; ++d.site_index) {
    Site site(Loaded(d));
    EXPECT_CONTAINS(RunOnce(&site, 1, 0, 2, kCount), "missing: rank 1");
  }
}

void Disagree(int process) {
  Description d = Remote(2, 1, kCount, "shm_faults_test.cc:8");
  if (process == 1) d.reduce_op = jcoll::ReduceOp::kMax;
  for (d.site_index = 100; d.site_index < 400; ++d.site_index) {
    Site site(Loaded(d));
    EXPECT_CONTAINS(RunOnce(&site, 1, process, 2, kCount), "the same call");
  }
}

TEST(FailuresGiveTheirMemoryBack) {
  EXPECT(InProcesses(
             3,
             [](int process) {
               if (process == 0) WaitInVain();
               if (process < 2) Disagree(process);
               Description d = Remote(3, 1, kCount, "shm_faults_test.cc:9");
               d.site_index = 1000;
               Site site(Loaded(d));
               EXPECT_EQ(RunOnce(&site, 1, process, 3, kCount), "");
             },
             /*arena_nbytes=*/1 << 20) == Zeros(3));
}

// Independent collectives in different orders, with memory for one.
TEST(MemoryThatTheOthersCollectiveHolds) {
  EXPECT(InProcesses(
             2,
             [](int process) {
               OnThreads(2, [&](int i) {
                 if (i == 1) sleep_for(milliseconds(30));
                 Description d = Remote(2, 1, kCount, "shm_faults_test.cc:10");
                 d.site_index = i == process;
                 d.timeout_s = 0.4;
                 Site site(Loaded(d));
                 const std::string error = RunOnce(&site, 1, process, 2, kCount);
                 EXPECT_CONTAINS(error, "JCOLL_SHM_SIZE");
                 EXPECT_CONTAINS(error, "shared memory");
               });
             },
             /*arena_nbytes=*/500 << 10) == Zeros(2));
}

Post* Open(const Key& key, bool as_failed = false) {
  return World::Get()->OpenPost(key, 1, 2, {1, 1}, "a call", " called at a.py:1", as_failed);
}

TEST(APostThatIsHeldIsNotUsedAgain) {
  EXPECT(InProcesses(2, [](int process) {
           Site barrier(Loaded(Remote(2, 1, 1, "shm_faults_test.cc:11")));
           World* world = World::Get();
           const Key key{1, 500};
           if (process == 0) {
             Post* post = Open(key);
             world->Fail(post, "a cause");
             world->Retire(post, 0, 0);
           }
           EXPECT_EQ(RunOnce(&barrier, 1, process, 2, 1), "");
           Post* held = process == 1 ? world->FindAndHold(0, key) : nullptr;
           EXPECT_EQ(RunOnce(&barrier, 2, process, 2, 1), "");
           if (process == 0) {
             for (uint64_t i = 0; i < 600; ++i) {
               Post* post = Open({2, 17 * i});
               if (post == nullptr) continue;
               world->Fail(post, "another");
               world->Retire(post, 0, 0);
             }
           }
           EXPECT_EQ(RunOnce(&barrier, 3, process, 2, 1), "");
           if (process == 1) {
             EXPECT(held != nullptr && world->Find(0, key) == held);
             EXPECT_EQ(held->error.Get(), "a cause");
             held->LetGo(1);
             held->Drop(1);
           }
           EXPECT_EQ(RunOnce(&barrier, 4, process, 2, 1), "");
           if (process == 0) {
             Open({3, 501});  // Sweeps.
             EXPECT(world->Find(0, key) == nullptr);
           }
           EXPECT_EQ(RunOnce(&barrier, 5, process, 2, 1), "");
           // It is over: a hold of it cannot be had.
           if (held != nullptr) EXPECT(!held->Hold(0, 1));
         }) == Zeros(2));
}

TEST(AFullWindowHasRoomForFailures) {
  EXPECT(InProcesses(2, [](int) {
           for (uint64_t i = 0; i < World::kWindow - World::kReserve; ++i) {
             EXPECT(Open({i, 40}) != nullptr);
           }
           EXPECT(Open({100, 40}) == nullptr);
           EXPECT(Open({100, 40}, /*as_failed=*/true) != nullptr);
           EXPECT(World::Get()->Find(World::Get()->self(), {100, 40}) != nullptr);
         }) == Zeros(2));
}

TEST(TextThatDoesNotFitSaysSo) {
  jcoll::SharedText<16> text = {};
  for (const char* fits : {"123456789012345", "12345678", "", "1234567"}) {
    text.Set(fits);
    EXPECT_EQ(text.Get(), fits);
  }
  text.Set("1234567890123456");
  EXPECT_EQ(text.Get(), "123456789012...");
  text.Set("1234567890\u20ac\u20ac");  // No half of a character.
  EXPECT_EQ(text.Get(), "1234567890...");
}

// Not that XLA does that. Run ids may wrap around.
TEST(ALaunchThatIsOvertaken) {
  EXPECT(InProcesses(2, [](int process) {
           Site site(Loaded(Remote(2, 1, 1, "shm_faults_test.cc:13")));
           for (int64_t run : {INT32_MAX - 1, INT32_MAX, INT32_MIN}) {
             EXPECT_EQ(RunOnce(&site, run, process, 2, 1), "");
           }
           const std::string error = RunOnce(&site, process == 0 ? 5 : INT32_MAX, process, 2, 1);
           EXPECT_CONTAINS(error, "a later launch of its program came to it before this one");
         }) == Zeros(2));
}

#ifndef __SANITIZE_THREAD__  // Whose runtime needs its thread.

// The handler goes on with it, and the continuations run on its thread.
TEST(NoThreadForProgress) {
  EXPECT(InProcesses(2, [](int process) {
           Site site(Loaded(Remote(2, 1, 1000, "shm_faults_test.cc:12")));
           if (process == 0) {
             pthread_attr_t attr;
             pthread_attr_init(&attr);
             pthread_attr_setstacksize(&attr, size_t{1} << 46);
             EXPECT_EQ(pthread_setattr_default_np(&attr), 0);
           }
           for (int run = 0; run < 3; ++run) {
             if (process == 1) sleep_for(milliseconds(20));
             EXPECT_EQ(RunOnce(&site, run, process, 2, 1000), "");
           }
         }) == Zeros(2));
}

#endif

}  // namespace
