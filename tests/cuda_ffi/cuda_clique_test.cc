// What lasts between calls: the ranks' first meeting, memory, addresses, failures.

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <map>
#include <string>

#include "check.h"
#include "csrc/failure_report.h"
#include "cuda/ffi/health.h"
#include "fake_kernels.h"
#include "job.h"

namespace {

using fake::AllReduce;
using fake::Attributes;
using fake::Job;
using fake::With;
using fake::Xla;
using jcoll::gpu::CheckHealth;
using jcoll::gpu::ErrorKind;
using jcoll::gpu::ErrorRecord;
using jcoll::gpu::SignalPad;

void Reset() {
  fake::Reset();
  fake::ResetKernels();
}

// A program of one collective that has run once, on ranks that nothing is wrong with.
struct Ran {
  explicit Ran(const Attributes& attributes) : job(&xla, attributes) {
    EXPECT(!job.Instantiate());
    EXPECT(fake::AllWell(job.Run()));
    launched = fake::TakeLaunched();
  }
  struct Clean {
    Clean() { Reset(); }
  } clean;
  Xla xla;
  Job job;
  std::vector<fake::Launched> launched;
};

// As a kernel would, once, on the device: the fields, and then that they are there.
void Fail(ErrorRecord* record, ErrorKind kind, uint32_t op_id) {
  record->op_id = op_id;
  record->call = 17;
  record->rank = 0;
  record->peer = 1;
  record->block = 3;
  record->expected = 42;
  record->seen = 41;
  record->waited_ns = 1500000000;
  record->kind = kind;
  __atomic_store_n(&record->state, 2u, __ATOMIC_RELEASE);
}

bool Says(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return true;
  std::fprintf(stderr, "  not \"%s\" in: %s\n", part.c_str(), text.c_str());
  return false;
}

}  // namespace

TEST(AddressesAreAskedForOnce) {
  Ran ran(AllReduce(4, "two_shot"));
  Job& job = ran.job;
  const auto group = job.group();
  // On each of 4 ranks: the pad, the operand, the result on 4 ranks.
  EXPECT_EQ(group->num_lookups(), 4 * 3 * 4);
  EXPECT(fake::AllWell(job.Stage(XLA_FFI_ExecutionStage_EXECUTE)));
  EXPECT_EQ(group->num_lookups(), 48);
  // Another run: one address of each buffer, to see that the window is the same.
  EXPECT(fake::AllWell(job.Run()));
  EXPECT_EQ(group->num_lookups(), 48 + 4 * 2);
  // The same buffers by another instruction.
  Job other(&ran.xla, job.attributes);
  other.inputs = job.inputs;
  other.outputs = job.outputs;
  EXPECT(!other.Instantiate());
  EXPECT(fake::AllWell(other.Run()));
  EXPECT_EQ(group->num_lookups(), 56 + 4 * 2);
}

TEST(WindowsThatXlaMadeAnew) {
  Ran ran(AllReduce(2, "two_shot"));
  Job& job = ran.job;
  // The same handles and offsets on rank 0, and another buffer on rank 1.
  ran.xla.ForgetWindows();
  Job elsewhere(&ran.xla, job.attributes);
  job.inputs[1] = elsewhere.inputs[1];
  EXPECT(fake::AllWell(job.Run()));
  const auto launched = fake::TakeLaunched();
  EXPECT(launched[0].call.peers.input[1] == job.inputs[1][0].data);
  EXPECT(launched[0].call.peers.input[0] == job.inputs[0][0].data);
}

TEST(RegistrationsInTheSameOrder) {
  Reset();
  Xla xla;
  xla.minor_version = 1;
  const Attributes attributes = AllReduce(4);
  std::vector<std::unique_ptr<Job>> jobs;
  for (const int64_t count : {8, 3000, 100000, 3000}) {
    jobs.push_back(std::make_unique<Job>(&xla, With(attributes, {{"count", count}})));
    EXPECT(!jobs.back()->Instantiate());
  }
  // Every rank runs the programs in the same order, but at its own pace.
  fake::OnAll(4, [&](int rank) {
    for (const auto& job : jobs) {
      const auto error =
          job->instruction->RunAll(rank, job->inputs[rank], job->outputs[rank], job->streams[rank]);
      EXPECT_EQ(error.value_or("ok"), "ok");
    }
  });
  const auto first = jobs[0]->group()->registered_nbytes(0);
  EXPECT(first.size() > 4);
  for (int rank = 1; rank < 4; ++rank) {
    EXPECT(jobs[0]->group()->registered_nbytes(rank) == first);
  }
}

TEST(CommunicatorOfAnotherSize) {
  Reset();
  Xla xla;
  xla.make_group = [](fake::Group* group) { group->count_says = 3; };
  Job job(&xla, AllReduce(2));
  EXPECT(!job.Instantiate());
  EXPECT(fake::AllSay(job.Run(), "a communicator of 3 ranks, where this is rank"));
}

TEST(RanksThatAreNotThose) {
  Reset();
  Xla xla;
  xla.make_group = [](fake::Group* group) { group->user_rank_says = {{0, 1}, {1, 0}}; };
  Job job(&xla, AllReduce(2));
  EXPECT(!job.Instantiate());
  EXPECT(fake::AllSay(job.Run(), "NCCL and XLA disagree about the ranks"));
  EXPECT(fake::AllSay(job.Run(), "NCCL and XLA disagree about the ranks"));
}

TEST(OtherProgramOnOneRank) {
  Reset();
  Xla xla;
  Job job(&xla, AllReduce(3, "two_shot"));
  Job deviant(&xla, With(job.attributes, {{"reduce_op", "max"}}));
  EXPECT(!job.Instantiate());
  EXPECT(!deviant.Instantiate());
  fake::Errors errors(3);
  fake::OnAll(3, [&](int rank) {
    Job& mine = rank == 2 ? deviant : job;
    errors[rank] =
        mine.instruction->RunAll(rank, mine.inputs[rank], mine.outputs[rank], mine.streams[rank]);
  });
  EXPECT(fake::AllSay(errors, "is at another collective than rank"));
  EXPECT(Says(errors[0].value_or("ok"), "rank 2 is at another collective than rank 0"));
  EXPECT(fake::TakeLaunched().empty());
}

TEST(ARankThatDoesNotCome) {
  Reset();
  Xla xla;
  xla.minor_version = 1;
  Job job(&xla, With(AllReduce(3), {{"timeout_s", 0.05}}));
  EXPECT(!job.Instantiate());
  const auto errors = job.RunOn({0, 2});
  EXPECT(Says(errors[0].value_or("ok"),
              "4 jcoll: what the ranks tell each other at first was not "
              "over after 0.05 s"));
  EXPECT(errors[2].has_value());
  // What they have said is still on its way: nobody must take it for what comes next.
  const int exchanges = job.group()->num_exchanges(0);
  EXPECT(Says(job.RunOn({0})[0].value_or("ok"), "was not over after 0.05 s"));
  Job other(&xla, job.attributes);
  EXPECT(!other.Instantiate());
  EXPECT(Says(other.RunOn({0})[0].value_or("ok"), "was not over after 0.05 s"));
  EXPECT_EQ(job.group()->num_exchanges(0), exchanges);
}

TEST(NonBlockingCommunicator) {
  Reset();
  Xla xla;
  xla.make_group = [](fake::Group* group) { group->is_nonblocking = true; };
  Job job(&xla, AllReduce(3));
  EXPECT(!job.Instantiate());
  EXPECT(fake::AllWell(job.Run()));
  EXPECT_EQ(fake::TakeLaunched().size(), 3);
}

TEST(AFailureIsToldOnceAndTheCommunicatorIsDead) {
  Ran ran(AllReduce(2, "two_shot"));
  Job& job = ran.job;
  const auto& launched = ran.launched;
  Job unharmed(&ran.xla, AllReduce(2, "two_shot"));
  EXPECT(!unharmed.Instantiate());
  EXPECT(fake::AllWell(unharmed.Run()));
  fake::TakeLaunched();
  EXPECT(CheckHealth().empty());
  Fail(launched[0].call.peers.error, ErrorKind::kTimeout, launched[0].call.op_id);
  Fail(launched[1].call.peers.error, ErrorKind::kPeerGaveUp, launched[1].call.op_id);

  const auto execute = XLA_FFI_ExecutionStage_EXECUTE;
  const auto first = job.Stage(execute);
  const std::string text = first[0].value_or("ok");
  EXPECT(
      Says(text, "4 jcoll.all_reduce over axis 'x' (float32[8], two_shot) called at train.py:42"));
  EXPECT(Says(text, "rank 0 waited 1.5 s for rank 1 and gave up (saw 41, needed 42)"));
  EXPECT(Says(text, "Device 0, call 17 of this communicator, block 3"));
  EXPECT(Says(text, "takes no more calls"));
  EXPECT(Says(first[1].value_or("ok"), "was told that the call had failed, because of rank 1"));
  const auto second = job.Stage(execute);
  EXPECT(fake::AllSay(second, "13 jcoll: this communicator takes no more calls"));
  EXPECT(Says(second[0].value_or("ok"), "rank 0 waited 1.5 s for rank 1"));
  EXPECT(fake::TakeLaunched().empty());
  // Other instructions on the communicator learn of it too; other communicators are well.
  Job other(&ran.xla, job.attributes);
  EXPECT(!other.Instantiate());
  EXPECT(fake::AllSay(other.Run(), "takes no more calls"));
  EXPECT(fake::AllWell(unharmed.Run()));
  EXPECT_EQ(CheckHealth().size(), 2);
  EXPECT(Says(CheckHealth().at(0), "rank 0 waited 1.5 s for rank 1"));
  // XLA makes the communicator anew: it works, and what was wrong is not forgotten.
  ran.xla.ForgetCommunicators();
  EXPECT(fake::AllWell(job.Run()));
  EXPECT_EQ(CheckHealth().size(), 2);
}

// A CUDA graph that is replayed: XLA prepares and initializes what is in it, and that is all that
// the handler sees of the run.
TEST(AFailureInAReplayedGraph) {
  Ran ran(AllReduce(2, "two_shot"));
  Job& job = ran.job;
  const auto& launched = ran.launched;
  const auto replay = [&job] {
    const auto errors = job.Stage(XLA_FFI_ExecutionStage_PREPARE);
    return fake::AllWell(errors) ? job.Stage(XLA_FFI_ExecutionStage_INITIALIZE) : errors;
  };
  EXPECT(fake::AllWell(replay()));
  Fail(launched[1].call.peers.error, ErrorKind::kTimeout, launched[1].call.op_id);
  EXPECT(Says(replay()[1].value_or("ok"), "4 jcoll.all_reduce over axis 'x'"));
  EXPECT(Says(replay()[1].value_or("ok"), "takes no more calls"));
}

TEST(WhatIsKnownOfAFailureIsLogged) {
  Ran ran(AllReduce(2, "two_shot"));
  Job& job = ran.job;
  const auto& launched = ran.launched;
  jcoll::gpu::SignalPad* pad = launched[0].call.peers.pad[0];
  pad->calls = 17;
  pad->epoch[3] = 41;
  pad->inbox[3][1] = 40;
  Fail(launched[0].call.peers.error, ErrorKind::kTimeout, launched[0].call.op_id);
  fake::TakeLog();
  CheckHealth();
  const auto log = fake::TakeLog();
  EXPECT_EQ(log.size(), 1);
  if (log.empty()) return;
  EXPECT(Says(log[0], "rank 0 waited 1.5 s for rank 1"));
  EXPECT(Says(log[0], "Last calls put on the stream of this device"));
  EXPECT(Says(log[0], "\n    jcoll.all_reduce over axis 'x' (float32[8], two_shot)"));
  EXPECT(Says(log[0], "block 3: launches ended 17, epoch 41"));
  EXPECT(Says(log[0], " 0:0,0 1:40,0."));
  job.Stage(XLA_FFI_ExecutionStage_EXECUTE);
  EXPECT(fake::TakeLog().empty());
}

// In a file, where a folder is set, and then not on stderr.
TEST(WhatIsKnownOfAFailureIsReported) {
  char folder[] = "/tmp/jcoll-report-XXXXXX";
  EXPECT(mkdtemp(folder) != nullptr);
  jcoll::SetReportFolder(folder, "cuda");
  Ran ran(AllReduce(2, "two_shot"));
  const auto& call = ran.launched[0].call;
  call.peers.pad[0]->calls = 17;
  call.peers.pad[0]->inbox[3][1] = 40;
  Fail(call.peers.error, ErrorKind::kTimeout, call.op_id);
  fake::TakeLog();
  CheckHealth();
  jcoll::SetReportFolder("", "cuda");
  const auto log = fake::TakeLog();
  EXPECT_EQ(log.size(), 1);
  if (log.empty()) return;
  EXPECT(Says(log[0], "rank 0 waited 1.5 s for rank 1"));
  EXPECT(!Says(log[0], "Last calls put on the stream"));
  const size_t at = log[0].find(folder);
  EXPECT(at != std::string::npos);
  if (at == std::string::npos) return;
  std::ifstream file(log[0].substr(at, log[0].rfind('.') - at));
  const std::string text((std::istreambuf_iterator<char>(file)), {});
  EXPECT(Says(text, "{\"runtime\": \"cuda\", \"host\": \""));
  EXPECT(Says(text, "rank 0 waited 1.5 s for rank 1"));
  EXPECT(Says(text, "\"last_calls\": [\"jcoll.all_reduce over axis 'x' (float32[8], two_shot)"));
  EXPECT(Says(text, "\"block\": 3, \"launches_ended\": 17"));
  EXPECT(Says(text, "{\"rank\": 1, \"epoch\": 40, \"lines_read\": 0}]"));
}

// The new communicators have the addresses of those that XLA has destroyed.
TEST(CommunicatorsMadeAnew) {
  Ran ran(AllReduce(3, "two_shot"));
  Job& job = ran.job;
  const auto& before = ran.launched;
  const auto* comm = job.group()->comm(0);
  ran.xla.ForgetCommunicators();
  EXPECT(fake::AllWell(job.Run()));
  EXPECT(job.group()->comm(0) == comm);
  const auto after = fake::TakeLaunched();
  EXPECT_EQ(after.size(), 3);
  EXPECT(after[0].call.peers.pad[1] != before[0].call.peers.pad[1]);
  EXPECT(fake::AllWell(job.Run()));
  EXPECT(fake::TakeLaunched()[0].call.peers.pad[1] == after[0].call.peers.pad[1]);
}

// Programs on other devices number these from 0 too: device 0 is rank 0 of two groups that look
// alike, and its peers are of one each.
TEST(SubmeshesInTurn) {
  Reset();
  Xla xla;
  const Attributes attributes = With(AllReduce(2, "two_shot"), {{"timeout_s", 2.0}});
  Job first(&xla, attributes, {0, 1});
  Job second(&xla, attributes, {0, 2});
  Job swapped(&xla, attributes, {1, 0});
  std::map<Job*, std::vector<SignalPad*>> pads;
  for (Job* job : {&first, &second, &swapped}) EXPECT(!job->Instantiate());
  for (int run = 0; run < 3; ++run) {
    for (Job* job : {&first, &second, &swapped}) {
      const auto errors = job->Run();
      EXPECT_EQ(fake::Join(errors), fake::Join(fake::Errors(2)));
      const auto launched = fake::TakeLaunched();
      EXPECT_EQ(launched.size(), 2);
      if (launched.size() != 2) continue;
      const auto* of_rank = launched[0].call.peers.pad;
      EXPECT(std::equal(of_rank, of_rank + 2, launched[1].call.peers.pad));
      const std::vector<SignalPad*> now(of_rank, of_rank + 2);
      if (run == 0) pads[job] = now;
      EXPECT(pads[job] == now);
    }
  }
  // Made once.
  for (Job* job : {&first, &second, &swapped}) {
    EXPECT_EQ(job->group()->registered_nbytes(0).size(), 1);
  }
  EXPECT(pads[&first] != pads[&second] && pads[&first] != pads[&swapped]);
}

// As axes of a mesh of 2x2 devices and of a mesh of two of them: groups that are named otherwise
// have one communicator, and XLA makes a new one for both.
TEST(GroupsThatShareACommunicator) {
  Reset();
  Xla xla;
  const Attributes of_two = With(AllReduce(2, "two_shot"), {{"timeout_s", 2.0}});
  Job all(&xla, With(of_two, {{"groups", std::vector<int64_t>{0, 1, 2, 3}}}));
  Job part(&xla, of_two);
  for (int round = 0; round < 2; ++round) {
    for (Job* job : {&all, &part}) {
      EXPECT(!job->Instantiate());
      const auto errors = job->Run();
      EXPECT_EQ(fake::Join(errors), fake::Join(fake::Errors(job->num_ranks())));
    }
    EXPECT(all.group() == part.group());
    const auto launched = fake::TakeLaunched();
    EXPECT_EQ(launched.size(), 6);
    EXPECT(launched[0].call.peers.pad[1] == launched[1].call.peers.pad[1]);
    EXPECT_EQ(part.group()->registered_nbytes(0).size(), 1);
    xla.ForgetCommunicators();
  }
}

TEST(RowsOutside) {
  Ran ran(AllReduce(2, "two_shot"));
  Job& job = ran.job;
  const auto& launched = ran.launched;
  Fail(launched[1].call.peers.error, ErrorKind::kRowsOutside, launched[1].call.op_id);
  const auto errors = job.Stage(XLA_FFI_ExecutionStage_EXECUTE);
  EXPECT(!errors[0]);
  EXPECT(Says(errors[1].value_or("ok"), "3 jcoll.all_reduce"));  // INVALID_ARGUMENT.
  EXPECT(Says(errors[1].value_or("ok"), "what rank 0 sends to rank 1 ends at row 41"));
  EXPECT(Says(errors[1].value_or("ok"), "Correct the offsets and sizes."));
}

TEST(ManyProgramsAtOnce) {
  Reset();
  Xla xla;
  // Communicators of their own: any order on any rank.
  std::vector<std::unique_ptr<Job>> jobs;
  for (int i = 0; i < 4; ++i) {
    jobs.push_back(std::make_unique<Job>(&xla, AllReduce(4)));
    EXPECT(!jobs.back()->Instantiate());
  }
  fake::OnAll(16, [&](int i) {
    Job& job = *jobs[i / 4];
    const int rank = i % 4;
    for (int call = 0; call < 20; ++call) {
      const auto error =
          job.instruction->RunAll(rank, job.inputs[rank], job.outputs[rank], job.streams[rank]);
      EXPECT_EQ(error.value_or("ok"), "ok");
      CheckHealth();
    }
  });
  EXPECT_EQ(fake::TakeLaunched().size(), 4 * 4 * 20);
}
