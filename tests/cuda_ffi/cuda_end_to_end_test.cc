// From XLA's call frames to the results: the real kernels, in the emulator, on memory that the host
// side has registered and addresses that it has found.

#include <cstring>
#include <functional>

#include "check.h"
#include "csrc/plan_store.h"
#include "cuda/emulator/emulator.h"
#include "cuda/ffi/health.h"
#include "job.h"

namespace {

using fake::AllReduce;
using fake::Array;
using fake::Attributes;
using fake::Job;
using fake::With;
using fake::Xla;

// Windows of XLA's, and jcoll's own.
constexpr int kMinorVersions[] = {2, 1};

void Reset(int num_ranks) {
  fake::Reset();
  for (int device = 0; device < num_ranks; ++device) fake::devices().facts[device] = {80, 3};
}

float* Floats(const Array& array) { return static_cast<float*>(array.data); }

bool Has(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

// A whole number, so that sums are exact: element i of what a rank has in a call.
float Value(int call, int rank, int64_t i) {
  return static_cast<float>((call * 7 + rank * 31 + i * 3) % 101);
}

// Runs the job three times on new values; `expected`(call, rank, i) is element i of the result.
void ExpectResults(Job& job, const std::function<float(int, int, int64_t)>& expected) {
  EXPECT(!job.Instantiate());
  for (int call = 0; call < 3; ++call) {
    for (int rank = 0; rank < job.num_ranks(); ++rank) {
      for (int64_t i = 0; i < job.inputs[rank][0].shape[0]; ++i) {
        Floats(job.inputs[rank][0])[i] = Value(call, rank, i);
      }
    }
    EXPECT_EQ(fake::Join(job.Run()), fake::Join(fake::Errors(job.num_ranks())));
    int num_wrong = 0;
    for (int rank = 0; rank < job.num_ranks(); ++rank) {
      for (int64_t i = 0; i < job.outputs[rank][0].shape[0]; ++i) {
        num_wrong += Floats(job.outputs[rank][0])[i] != expected(call, rank, i);
      }
    }
    EXPECT_EQ(num_wrong, 0);
  }
}

float Sum(int call, int num_ranks, int64_t i) {
  float sum = 0;
  for (int rank = 0; rank < num_ranks; ++rank) sum += Value(call, rank, i);
  return sum;
}

}  // namespace

TEST(AllReduceByEachKernel) {
  for (const int minor_version : kMinorVersions) {
    for (const char* algorithm : {"direct", "one_shot", "two_shot"}) {
      for (const int64_t count : {1, 1000, 30011}) {
        Reset(3);
        Xla xla;
        xla.minor_version = minor_version;
        Job job(&xla, With(AllReduce(3, algorithm), {{"count", count}}));
        ExpectResults(job, [](int call, int, int64_t i) { return Sum(call, 3, i); });
      }
    }
  }
}

// An encoded plan in which the last rank sends nothing until it has what all others pass along.
std::string PassAlong(int32_t num_ranks) {
  constexpr int32_t kSend = 0, kRecv = 1, kRecvReduce = 2, kInput = 0, kOutput = 1;
  std::vector<int32_t> steps, first_step = {0};
  for (int32_t r = 0; r < num_ranks; ++r) {
    const auto add = [&](int32_t kind, int32_t peer, int32_t src, int32_t dst) {
      steps.insert(steps.end(), {r, kind, peer, src, 0, dst, 0, 1});
    };
    if (r > 0) add(kRecvReduce, r - 1, kInput, kOutput);
    if (r < num_ranks - 1) {
      add(kSend, r + 1, r > 0 ? kOutput : kInput, 0);
      add(kRecv, r + 1, 0, kOutput);
    }
    if (r > 0) add(kSend, r - 1, kOutput, 0);
    first_step.push_back(static_cast<int32_t>(steps.size() / 8));
  }
  std::vector<int32_t> words = {
      'J' | 'C' << 8 | 'P' << 16 | 'L' << 24, 1, 0, 0, num_ranks, 0, 1, 0, first_step.back(), 0};
  words.insert(words.end(), first_step.begin(), first_step.end());
  words.insert(words.end(), steps.begin(), steps.end());
  words[2] = static_cast<int32_t>(words.size());
  return std::string(reinterpret_cast<const char*>(words.data()), words.size() * 4);
}

// By lines and, the last, by counters.
TEST(Plans) {
  jcoll::SetPlanMaker([](const jcoll::PlanKey& key) {
    return std::variant<std::string, jcoll::Failure>(PassAlong(key.num_ranks));
  });
  for (const int minor_version : kMinorVersions) {
    for (const int64_t count : {1, 1000, 30011}) {
      Reset(3);
      Xla xla;
      xla.minor_version = minor_version;
      const auto attributes = AllReduce(3, "pass_along");
      Job job(&xla, With(attributes, {{"plan_op", "all_reduce"}, {"count", count}}));
      ExpectResults(job, [](int call, int, int64_t i) { return Sum(call, 3, i); });
    }
  }
  jcoll::SetPlanMaker(nullptr);
  jcoll::ForgetPlans();
}

// Kernels that take turns on the same pads and the same scratch.
TEST(ProgramsOnOneClique) {
  Reset(4);
  Xla xla;
  const Attributes attributes = AllReduce(4);
  const Attributes two_shot = With(attributes, {{"algorithm", "two_shot"}});
  Job small(&xla, attributes), large(&xla, With(two_shot, {{"count", int64_t{5000}}}));
  for (int round = 0; round < 3; ++round) {
    for (Job* job : {&small, &large}) {
      ExpectResults(*job, [](int call, int, int64_t i) { return Sum(call, 4, i); });
    }
  }
}

TEST(OtherOps) {
  constexpr int kRanks = 3;
  const int64_t count = 1001;
  for (const int minor_version : kMinorVersions) {
    Reset(kRanks);
    Xla xla;
    xla.minor_version = minor_version;
    const auto attributes = With(AllReduce(kRanks), {{"count", count}});
    Job reduce_scatter(&xla, With(attributes, {{"op", "reduce_scatter"}}));
    ExpectResults(reduce_scatter, [=](int call, int rank, int64_t i) {
      return Sum(call, kRanks, rank * count + i);
    });
    const auto moves = With(attributes, {{"reduce_op", ""}});
    Job all_gather(&xla, With(moves, {{"op", "all_gather"}}));
    ExpectResults(all_gather, [=](int call, int, int64_t i) {
      return Value(call, static_cast<int>(i / count), i % count);
    });
    Job all_to_all(&xla, With(moves, {{"op", "all_to_all"}}));
    ExpectResults(all_to_all, [=](int call, int rank, int64_t i) {
      return Value(call, static_cast<int>(i / count), rank * count + i % count);
    });
    Job broadcast(&xla, With(moves, {{"op", "broadcast"}, {"root", int64_t{2}}}));
    ExpectResults(broadcast, [](int call, int, int64_t i) { return Value(call, 2, i); });
    Job barrier(&xla, With(moves, {{"op", "barrier"}}));
    ExpectResults(barrier, [](int call, int rank, int64_t i) { return Value(call, rank, i); });
  }
}

// Rank r sends rank d r + d rows of its own, one after the other; they arrive by rank.
TEST(RaggedAllToAll) {
  constexpr int kRanks = 3;
  constexpr int64_t kWidth = 5, kRows = 12;
  for (const int minor_version : kMinorVersions) {
    Reset(kRanks);
    Xla xla;
    xla.minor_version = minor_version;
    Job job(&xla, With(AllReduce(kRanks), {{"op", "ragged_all_to_all"},
                                           {"reduce_op", ""},
                                           {"row_nbytes", kWidth * 4},
                                           {"updates_per_rank", int64_t{1}},
                                           {"input_rows", kRows},
                                           {"output_rows", kRows}}));
    auto ints = [&](int rank, int operand) {
      return static_cast<int64_t*>(job.inputs[rank][operand].data);
    };
    for (int rank = 0; rank < kRanks; ++rank) {
      int64_t sent = 0;
      for (int peer = 0; peer < kRanks; ++peer) {
        ints(rank, 2)[peer] = sent;
        sent += ints(rank, 3)[peer] = rank + peer;
        ints(rank, 5)[peer] = rank + peer;
        ints(rank, 4)[peer] = 0;
        for (int before = 0; before < rank; ++before) ints(rank, 4)[peer] += before + peer;
      }
      for (int64_t i = 0; i < kRows * kWidth; ++i) Floats(job.inputs[rank][1])[i] = -1;
    }
    ExpectResults(job, [](int call, int rank, int64_t i) {
      int64_t row = i / kWidth;
      for (int source = 0; source < kRanks; ++source) {
        if (row >= source + rank) {
          row -= source + rank;
          continue;
        }
        int64_t start = 0;
        for (int before = 0; before < rank; ++before) start += source + before;
        return Value(call, source, (start + row) * kWidth + i % kWidth);
      }
      return -1.0f;  // Nobody sends it.
    });
  }
}

TEST(ARankThatDoesNotExecute) {
  Reset(3);
  Xla xla;
  const size_t ill_before = jcoll::gpu::CheckHealth().size();
  Job job(&xla, With(AllReduce(3, "two_shot"), {{"timeout_s", 0.5}}));
  ExpectResults(job, [](int call, int, int64_t i) { return Sum(call, 3, i); });
  for (const auto stage : {XLA_FFI_ExecutionStage_PREPARE, XLA_FFI_ExecutionStage_INITIALIZE}) {
    EXPECT(fake::AllWell(job.Stage(stage)));
  }
  fake::OnAll(2, [&](int rank) {  // Without rank 2.
    const auto error = job.instruction->Run(XLA_FFI_ExecutionStage_EXECUTE, rank, job.inputs[rank],
                                            job.outputs[rank], job.streams[rank]);
    EXPECT_EQ(error.value_or("ok"), "ok");  // Asynchronous: found out later.
    fake::Advance(job.streams[rank]);
  });
  EXPECT(Floats(job.outputs[0][0])[0] != Floats(job.outputs[0][0])[0]);  // NaN.
  const auto errors = job.Stage(XLA_FFI_ExecutionStage_EXECUTE);
  // One waited for rank 2; the other may have, or has been told so by the first.
  for (int rank = 0; rank < 2; ++rank) {
    const std::string error = errors[rank].value_or("ok");
    EXPECT(Has(error, " for rank 2 and gave up") || Has(error, "because of rank 2"));
  }
  EXPECT(jcoll::gpu::CheckHealth().size() >= ill_before + 2);
}
