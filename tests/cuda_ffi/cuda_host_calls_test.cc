// Collectives by NCCL's own functions: which, with what, and what it cannot do.

#include <algorithm>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "check.h"
#include "cuda/ffi/health.h"
#include "cuda/ffi/host_watch.h"
#include "fake_kernels.h"
#include "job.h"

namespace {

using fake::AllReduce;
using fake::Attributes;
using fake::HostCall;
using fake::Job;
using fake::With;
using fake::Xla;

// With an NCCL that tells no addresses of peers, so that nothing else is left.
void Reset() {
  fake::Reset();
  fake::ResetKernels();
  fake::nccl::Set(fake::OldNccl());
}

}  // namespace

TEST(OneCallPerOp) {
  Reset();
  struct Row {
    const char *op, *reduce_op, *dtype;
    HostCall call;  // All but the buffers.
  };
  using namespace jcoll::gpu::nccl;
  for (const Row& row : {
           Row{"all_reduce", "mean", "float32", {"AllReduce", 8, kFloat32, kAvg, -1, 0, 0, 0}},
           Row{"all_reduce", "min", "int32", {"AllReduce", 8, kInt32, kMin, -1, 0, 0, 0}},
           Row{"all_reduce", "max", "uint32", {"AllReduce", 8, kUint32, kMax, -1, 0, 0, 0}},
           Row{"reduce_scatter",
               "prod",
               "float32",
               {"ReduceScatter", 8, kFloat32, kProd, -1, 0, 0, 0}},
           Row{"all_gather", "", "float32", {"AllGather", 32, kUint8, -1, -1, 0, 0, 0}},
           Row{"broadcast", "", "int32", {"Broadcast", 32, kUint8, -1, 1, 0, 0, 0}},
       }) {
    Xla xla;
    Job job(&xla, With(AllReduce(2), {{"op", row.op},
                                      {"reduce_op", row.reduce_op},
                                      {"dtype", row.dtype},
                                      {"root", int64_t{1}}}));
    EXPECT(!job.Instantiate());
    const auto errors = job.Run();
    EXPECT_EQ(fake::Join(errors), fake::Join(fake::Errors(2)));
    for (int rank = 0; rank < 2; ++rank) {
      const auto calls = job.HostCalls(rank);
      EXPECT_EQ(calls.size(), 1);
      if (calls.empty()) continue;
      EXPECT_EQ(calls[0].name, row.call.name);
      EXPECT_EQ(calls[0].count, row.call.count);
      EXPECT_EQ(calls[0].type, row.call.type);
      EXPECT_EQ(calls[0].op, row.call.op);
      EXPECT_EQ(calls[0].peer, row.call.peer);
      EXPECT(calls[0].from == job.inputs[rank][0].data);
      EXPECT(calls[0].to == job.outputs[rank][0].data);
    }
  }
}

TEST(AllToAll) {
  Reset();
  Xla xla;
  // A type that only moves.
  Job job(&xla,
          With(AllReduce(3), {{"op", "all_to_all"}, {"reduce_op", ""}, {"dtype", "float8_e3m4"}}));
  for (int rank = 0; rank < 3; ++rank) {
    job.inputs[rank][0].dtype = job.outputs[rank][0].dtype = XLA_FFI_DataType_F8E3M4;
  }
  EXPECT(!job.Instantiate());
  EXPECT(fake::AllWell(job.Run()));
  for (int rank = 0; rank < 3; ++rank) {
    const auto calls = job.HostCalls(rank);
    EXPECT_EQ(calls.size(), 6);
    for (size_t i = 0; i < calls.size(); ++i) {
      const int peer = static_cast<int>(i / 2);
      EXPECT_EQ(calls[i].name, i % 2 == 0 ? "Send" : "Recv");
      EXPECT_EQ(calls[i].count, 8);
      EXPECT_EQ(calls[i].peer, peer);
      const char* from = static_cast<char*>(job.inputs[rank][0].data) + 8 * peer;
      const char* to = static_cast<char*>(job.outputs[rank][0].data) + 8 * peer;
      EXPECT(i % 2 == 0 ? calls[i].from == from : calls[i].to == to);
    }
  }
}

TEST(WhatNcclDoesOtherwiseIsSaid) {
  struct Row {
    const char *reduce_op, *dtype, *said;
  };
  for (const Row& row : {
           Row{"max", "float32", "Mind that its min and max take no notice of NaN"},
           Row{"min", "bfloat16", "Mind that its min and max take no notice of NaN"},
           Row{"sum", "float16", "Mind that it rounds 16-bit floats at every rank"},
           Row{"sum", "float32", ""},
           Row{"max", "int32", ""},
       }) {
    Reset();
    Xla xla;
    Job job(&xla, With(AllReduce(2), {{"reduce_op", row.reduce_op}, {"dtype", row.dtype}}));
    for (int rank = 0; rank < 2; ++rank) {
      const bool is_16_bits = std::string(row.dtype).find("16") != std::string::npos;
      if (is_16_bits) job.inputs[rank][0].dtype = job.outputs[rank][0].dtype = XLA_FFI_DataType_F16;
    }
    EXPECT(!job.Instantiate());
    EXPECT(fake::AllWell(job.Run()));
    const auto log = fake::TakeLog();
    EXPECT(fake::Has(log, "jcoll.all_reduce is done by NCCL: "));
    EXPECT_EQ(fake::Has(log, "Mind that"), *row.said != 0);
    EXPECT(fake::Has(log, row.said));
  }
}

TEST(Complex) {
  Reset();
  Xla xla;
  auto run = [](Job& job) {
    for (int rank = 0; rank < 2; ++rank) {
      job.inputs[rank][0].dtype = job.outputs[rank][0].dtype = XLA_FFI_DataType_C64;
    }
    EXPECT(!job.Instantiate());
    return job.Run();
  };
  Job sum(&xla, With(AllReduce(2), {{"dtype", "complex64"}}));
  EXPECT(fake::AllWell(run(sum)));
  EXPECT_EQ(sum.HostCalls(0).at(0).count, 16);
  EXPECT_EQ(sum.HostCalls(0).at(0).type, jcoll::gpu::nccl::kFloat32);
  Job prod(&xla, With(AllReduce(2), {{"dtype", "complex64"}, {"reduce_op", "prod"}}));
  EXPECT(fake::AllSay(run(prod), "NCCL has no complex numbers"));
}

// Between NVLink domains: nothing is registered, looked up or said, though all of it could be had.
TEST(ByName) {
  fake::Reset();
  fake::ResetKernels();
  Xla xla;
  const Attributes by_name = AllReduce(2, "nccl");
  Job job(&xla, by_name);
  EXPECT(!job.Instantiate());
  const auto errors = job.Run();
  EXPECT_EQ(fake::Join(errors), fake::Join(fake::Errors(2)));
  EXPECT(fake::TakeLaunched().empty());
  EXPECT_EQ(xla.num_window_requests(), 0);
  EXPECT_EQ(job.group()->num_lookups(), 0);
  EXPECT(fake::TakeLog().empty());
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT(job.group()->registered_nbytes(rank).empty());
    const auto calls = job.HostCalls(rank);
    EXPECT_EQ(calls.size(), 1);
    if (calls.empty()) continue;
    EXPECT_EQ(calls[0].name, "AllReduce");
    EXPECT(calls[0].from == job.inputs[rank][0].data);
    EXPECT(calls[0].stream == job.streams[rank]);
  }
  // Another call on the same communicator still finds the peers.
  Job direct(&xla, With(by_name, {{"algorithm", "direct"}}));
  EXPECT(!direct.Instantiate());
  EXPECT(fake::AllWell(direct.Run()));
  EXPECT_EQ(fake::TakeLaunched().size(), 2);
  EXPECT(job.group() == direct.group());
  EXPECT(!job.group()->registered_nbytes(0).empty());
}

TEST(ByNameWhereNodesReachNothingOfEachOther) {
  fake::Reset();
  fake::ResetKernels();
  Xla xla;
  xla.make_group = [](fake::Group* group) {
    group->domain_size = 1;
    group->registration_fails_on = 1;
  };
  for (const auto& [op, reduce_op, name] : {std::tuple("reduce_scatter", "max", "ReduceScatter"),
                                            std::tuple("all_gather", "", "AllGather")}) {
    Job job(&xla, With(AllReduce(2, "nccl"), {{"op", op}, {"reduce_op", reduce_op}}));
    EXPECT(!job.Instantiate());
    EXPECT(fake::AllWell(job.Run()));
    EXPECT_EQ(job.HostCalls(1).at(0).name, name);
  }
  EXPECT(fake::Has(fake::TakeLog(), "is done by NCCL. Mind that its min and max"));
}

TEST(ByNameWhatNcclHasNot) {
  Reset();
  Xla xla;
  Job job(&xla, With(AllReduce(2, "nccl"), {{"dtype", "int16"}}));
  for (int rank = 0; rank < 2; ++rank) {
    job.inputs[rank][0].dtype = job.outputs[rank][0].dtype = XLA_FFI_DataType_S16;
  }
  EXPECT(!job.Instantiate());
  EXPECT(fake::AllSay(job.Run(), "algorithm 'nccl' cannot serve this call: NCCL does not reduce"));
}

TEST(BrokenCommunicator) {
  Reset();
  Xla xla;
  Job job(&xla, AllReduce(2));
  EXPECT(!job.Instantiate());
  EXPECT(fake::AllWell(job.Run()));
  job.group()->is_broken = true;
  EXPECT(
      fake::AllSay(job.Stage(XLA_FFI_ExecutionStage_EXECUTE),
                   "13 jcoll.all_reduce over axis 'x' (float32[8], direct) called at train.py:42:"
                   " jcoll: the communicator of NCCL 2.27.3 failed: internal error"));
  EXPECT_EQ(job.HostCalls(0).size(), 1);
}

// By a clock of the test's own.
TEST(WatchOfHostCalls) {
  Reset();
  std::vector<std::pair<uint32_t, double>> late;
  jcoll::gpu::HostWatch watch(
      [&late](uint32_t op_id, double timeout_s) { late.emplace_back(op_id, timeout_s); });
  watch.Look(0);
  const auto registered = watch.Register(7, 5, [](const std::vector<int32_t>& words) {
    auto* memory = static_cast<int32_t*>(fake::NewMemory(8));
    std::copy(words.begin(), words.end(), memory);
    return std::variant<void*, jcoll::Failure>(memory);
  });
  const auto* marks = std::get_if<jcoll::gpu::HostWatch::Marks>(&registered);
  EXPECT(marks != nullptr);
  if (marks == nullptr) return;
  const auto begin = [&] { *marks->word = *marks->begun; };
  watch.Look(100);
  begin();
  watch.Look(101);
  *marks->word = *marks->done;
  watch.Look(200);
  begin();
  watch.Look(201);
  begin();  // Anew, so that the first has ended.
  watch.Look(205);
  watch.Look(209);
  EXPECT(late.empty());
  watch.Look(210.5);
  watch.Look(300);
  EXPECT_EQ(late.size(), 1);
  EXPECT(late == (std::vector<std::pair<uint32_t, double>>{{7, 5.0}}));
}

// Where there is nothing but NCCL, and where it was asked for.
void ExpectDeadline(const std::string& algorithm) {
  Xla xla;
  const size_t ill_before = jcoll::gpu::CheckHealth().size();
  Job job(&xla, With(AllReduce(2, algorithm), {{"timeout_s", 0.1}}));
  EXPECT(!job.Instantiate());
  EXPECT(fake::AllWell(job.Run()));
  fake::TakeLog();
  job.group()->hangs = true;
  for (int rank = 0; rank < 2; ++rank) {
    const auto error = job.instruction->Run(XLA_FFI_ExecutionStage_EXECUTE, rank, job.inputs[rank],
                                            job.outputs[rank], job.streams[rank]);
    EXPECT_EQ(error.value_or("ok"), "ok");
    fake::Advance(job.streams[rank]);
  }
  while (jcoll::gpu::CheckHealth().size() < ill_before + 2) std::this_thread::yield();
  const auto errors = job.Stage(XLA_FFI_ExecutionStage_INITIALIZE);
  EXPECT(fake::AllSay(errors, "4 jcoll.all_reduce over axis 'x'"));
  EXPECT(fake::AllSay(errors, "NCCL's collective was not over after 0.1 s, on rank"));
  EXPECT(fake::AllSay(job.Stage(XLA_FFI_ExecutionStage_INITIALIZE), "takes no more calls"));
  job.group()->hangs = false;
}

TEST(NcclDoesNotEnd) {
  Reset();
  ExpectDeadline("direct");
  fake::Reset();
  ExpectDeadline("nccl");
}

TEST(Barrier) {
  Reset();
  Xla xla;
  Job job(&xla, With(AllReduce(2), {{"op", "barrier"}, {"reduce_op", ""}}));
  EXPECT(!job.Instantiate());
  EXPECT(fake::AllWell(job.Run()));
  const auto calls = job.HostCalls(0);
  EXPECT_EQ(calls.size(), 1);
  EXPECT_EQ(calls.at(0).name, "AllReduce");
  EXPECT_EQ(calls.at(0).count, 1);
  EXPECT(calls.at(0).to != job.outputs[0][0].data);
}

TEST(RaggedIsRefused) {
  Reset();
  Xla xla;
  Job job(&xla, With(AllReduce(2), {{"op", "ragged_all_to_all"},
                                    {"reduce_op", ""},
                                    {"row_nbytes", int64_t{8}},
                                    {"updates_per_rank", int64_t{1}},
                                    {"input_rows", int64_t{5}},
                                    {"output_rows", int64_t{7}}}));
  EXPECT(!job.Instantiate());
  EXPECT(fake::AllSay(job.Run(), "need the counts on the host"));
}
