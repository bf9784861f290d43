// Plans: decoding, the order of steps, moves in one process, programs for several.
#include "csrc/plan.h"

#include <cstring>
#include <numeric>

#include "csrc/plan_bits.h"
#include "csrc/plan_moves.h"
#include "csrc/plan_run.h"
#include "csrc/plan_store.h"
#include "csrc/reduce.h"
#include "csrc/shm/program.h"
#include "tests/native/ranks.h"

namespace {

using jcoll::Plan;
using jcoll::PlanBuffer;
using jcoll::PlanMoves;
using jcoll::PlanOp;
using jcoll::PlanPrograms;
using jcoll::PlanStep;
using jcoll::StepKind;

constexpr auto kIn = PlanBuffer::kInput, kOut = PlanBuffer::kOutput,
               kScratch = PlanBuffer::kScratch;

PlanStep Send(int rank, int peer, PlanBuffer buffer, int chunk, int count = 1) {
  return {rank, StepKind::kSend, peer, buffer, chunk, kIn, 0, count};
}
PlanStep RecvReduce(int rank, int peer, PlanBuffer acc, int acc_chunk, PlanBuffer dst, int chunk) {
  return {rank, StepKind::kRecvReduce, peer, acc, acc_chunk, dst, chunk, 1};
}
PlanStep Recv(int rank, int peer, PlanBuffer dst, int chunk, int count = 1) {
  return {rank, StepKind::kRecv, peer, kIn, 0, dst, chunk, count};
}

Plan Make(PlanOp op, int num_ranks, int chunks, int num_scratch, std::vector<PlanStep> steps) {
  Plan plan;
  plan.op = op;
  plan.algorithm = "test";
  plan.num_ranks = num_ranks;
  plan.chunks_per_block = chunks;
  plan.num_scratch = num_scratch;
  plan.steps = std::move(steps);
  plan.first_step.push_back(0);
  for (int rank = 0; rank < num_ranks; ++rank) {
    int end = plan.first_step.back();
    while (end < static_cast<int>(plan.steps.size()) && plan.steps[end].rank == rank) ++end;
    plan.first_step.push_back(end);
  }
  return plan;
}

// A ring all_reduce, as jcoll/algorithms/ring.py builds it.
Plan Ring(int n) {
  std::vector<PlanStep> steps;
  for (int r = 0; r < n; ++r) {
    auto mod = [n](int v) { return ((v % n) + n) % n; };
    for (int k = 1; k < n; ++k) {
      steps.push_back(Send(r, mod(r + 1), k == 1 ? kIn : kOut, mod(r - k)));
      steps.push_back(RecvReduce(r, mod(r - 1), kIn, mod(r - k - 1), kOut, mod(r - k - 1)));
    }
    for (int k = 1; k < n; ++k) {
      steps.push_back(Send(r, mod(r + 1), kOut, mod(r - k + 1)));
      steps.push_back(Recv(r, mod(r - 1), kOut, mod(r - k)));
    }
  }
  return Make(PlanOp::kAllReduce, n, n, 0, steps);
}

std::vector<int32_t> Encode(const Plan& p) {
  std::vector<int32_t> words = {'J' | 'C' << 8 | 'P' << 16 | 'L' << 24,
                                1,
                                0,
                                static_cast<int32_t>(p.op),
                                p.num_ranks,
                                p.root,
                                p.chunks_per_block,
                                p.num_scratch,
                                static_cast<int32_t>(p.steps.size()),
                                1};
  words.push_back('r' | 'i' << 8 | 'n' << 16 | 'g' << 24);
  words.insert(words.end(), p.first_step.begin(), p.first_step.end());
  const auto* rows = reinterpret_cast<const int32_t*>(p.steps.data());
  words.insert(words.end(), rows, rows + p.steps.size() * 8);
  words[2] = static_cast<int32_t>(words.size());
  return words;
}

std::string DecodeError(const std::vector<int32_t>& words) {
  Plan plan;
  auto failure = jcoll::DecodePlan(words.data(), static_cast<int64_t>(words.size() * 4), &plan);
  return failure ? failure->message : "";
}

TEST(DecodesWhatIsEncoded) {
  const Plan ring = Ring(4);
  const std::vector<int32_t> words = Encode(ring);
  Plan plan;
  EXPECT(!jcoll::DecodePlan(words.data(), static_cast<int64_t>(words.size() * 4), &plan));
  EXPECT_EQ(plan.algorithm, "ring");
  EXPECT_EQ(plan.num_ranks, 4);
  EXPECT_EQ(plan.steps.size(), ring.steps.size());
  EXPECT(std::memcmp(plan.steps.data(), ring.steps.data(), ring.steps.size() * sizeof(PlanStep)) ==
         0);
}

// Every word but those of the name, set to values that no plan has there: an error, never a crash.
TEST(DamagedPlansAreRefusedOrHarmless) {
  const std::vector<int32_t> good = Encode(Ring(3));
  for (size_t i = 0; i < good.size(); ++i) {
    for (int32_t value : {-1, 1000, INT32_MAX, INT32_MIN}) {
      std::vector<int32_t> words = good;
      words[i] = value;
      Plan plan;
      if (jcoll::DecodePlan(words.data(), static_cast<int64_t>(words.size() * 4), &plan)) continue;
      PlanMoves moves;
      (void)jcoll::MakeMoves(plan, &moves);
      PlanPrograms programs;
      (void)jcoll::MakePrograms(plan, &programs);
    }
  }
  EXPECT_CONTAINS(DecodeError({1, 2, 3}), "too short");
  std::vector<int32_t> cut = good;
  cut.pop_back();
  EXPECT_CONTAINS(DecodeError(cut), "length");
}

// A ring's partial sums are nobody's result: one reduction per chunk is left, written to all ranks.
TEST(RingBecomesOneReductionPerChunk) {
  PlanMoves moves;
  EXPECT(!jcoll::MakeMoves(Ring(5), &moves));
  EXPECT_EQ(moves.moves.size(), size_t{5});
  for (const PlanMoves::Move& m : moves.moves) {
    EXPECT_EQ(m.num_srcs, 5);
    EXPECT_EQ(m.num_dsts, 5);
    EXPECT(m.is_last);
  }
  PlanMoves literal;
  EXPECT(!jcoll::MakeMoves(Ring(5), &literal, /*simplify=*/false));
  EXPECT_EQ(literal.moves.size(), size_t{2 * 5 * 4});
}

std::vector<std::vector<int>> RunPlan(const PlanMoves& moves, int count) {
  const int n = moves.num_ranks;
  std::vector<std::vector<int>> in(n), out(n);
  std::vector<jcoll::RankBuffers> buffers(n);
  for (int r = 0; r < n; ++r) {
    in[r].resize(count);
    std::iota(in[r].begin(), in[r].end(), 1000 * r);
    out[r].assign(count, -1);
    buffers[r].inputs[0] = in[r].data();
    buffers[r].outputs[0] = out[r].data();
  }
  jcoll::PlanRun run;
  run.Begin(&moves, &buffers, count * 4,
            jcoll::GetReduceFn(jcoll::DType::kS32, jcoll::ReduceOp::kSum), 4, 2);
  for (int lane = 0; lane < run.num_lanes(); ++lane) run.RunLane(lane);
  return out;
}

TEST(SimplifiedAndLiteralPlansAgree) {
  for (int n : {1, 2, 3, 7}) {
    PlanMoves simple, literal;
    EXPECT(!jcoll::MakeMoves(Ring(n), &simple));
    EXPECT(!jcoll::MakeMoves(Ring(n), &literal, false));
    for (int count : {0, 1, 5, 1000, 100003}) {
      const auto out = RunPlan(simple, count);
      if (n > 1) EXPECT(out == RunPlan(literal, count));
      for (int i = 0; i < count && n > 1; ++i) {
        EXPECT_EQ(out[n - 1][i], n * i + 1000 * n * (n - 1) / 2);
      }
    }
  }
}

// Rank 1 keeps the sum of ranks 0 and 1 as its result: it is used twice, and must be stored.
TEST(WhatIsKeptIsStored) {
  Plan plan =
      Make(PlanOp::kReduce, 2, 1, 1, {RecvReduce(0, 1, kIn, 0, kOut, 0), Send(1, 0, kIn, 0)});
  PlanMoves moves;
  EXPECT(!jcoll::MakeMoves(plan, &moves));
  // The root's sum, and zeros on the other rank.
  EXPECT_EQ(moves.moves.size(), size_t{2});
  const auto out = RunPlan(moves, 3);
  EXPECT(out[0] == (std::vector<int>{1000, 1002, 1004}));
  EXPECT(out[1] == (std::vector<int>{0, 0, 0}));
}

// Three ranks add x0 + (x1 + x2), rank 0 with rank 2's sum of the two. Who uses such a sum once,
// and can fold it, adds (x0 + x1) + x2. In `in_place` rank 1 is one of these between processes,
// too.
Plan UnequalUses(bool in_place) {
  const PlanBuffer sum = in_place ? kOut : kScratch;
  std::vector<PlanStep> steps = {Send(0, 1, kIn, 0), Send(0, 2, kIn, 0),
                                 RecvReduce(0, 2, kIn, 0, kOut, 0), Send(1, 2, kIn, 0),
                                 RecvReduce(1, 2, kIn, 0, sum, 0)};
  if (!in_place) steps.push_back(Send(1, 2, kScratch, 0));
  steps.push_back(RecvReduce(1, 0, sum, 0, kOut, 0));
  steps.insert(steps.end(), {Send(2, 1, kIn, 0), RecvReduce(2, 1, kIn, 0, kScratch, 0),
                             Send(2, 0, kScratch, 0)});
  if (in_place) {
    steps.push_back(RecvReduce(2, 0, kScratch, 0, kOut, 0));
  } else {
    steps.insert(steps.end(), {Recv(2, 0, kOut, 0), RecvReduce(2, 1, kOut, 0, kOut, 0)});
  }
  return Make(PlanOp::kAllReduce, 3, 1, 1, steps);
}

// What three ranks make of numbers whose sum depends on the order.
std::vector<float> Sums(const PlanMoves& moves) {
  float in[] = {1, 1 << 24, -(1 << 24)};
  std::vector<float> out(3);
  std::vector<jcoll::RankBuffers> buffers(3);
  for (int r = 0; r < 3; ++r) {
    buffers[r].inputs[0] = &in[r];
    buffers[r].outputs[0] = &out[r];
  }
  jcoll::PlanRun run;
  run.Begin(&moves, &buffers, 4, jcoll::GetReduceFn(jcoll::DType::kF32, jcoll::ReduceOp::kSum), 4,
            1);
  for (int lane = 0; lane < run.num_lanes(); ++lane) run.RunLane(lane);
  return out;
}

TEST(FoldingKeepsTheBitsEqual) {
  for (bool in_place : {false, true}) {
    const Plan plan = UnequalUses(in_place);
    PlanMoves folded;
    EXPECT(!jcoll::MakeMoves(plan, &folded));
    EXPECT(jcoll::DifferingBits(plan, folded).has_value());
    EXPECT(Sums(folded) != (std::vector<float>{1, 1, 1}));

    jcoll::LoadedPlan loaded;
    EXPECT(!jcoll::LoadPlan(plan, &loaded));
    EXPECT(!jcoll::DifferingBits(plan, loaded.moves));
    EXPECT(Sums(loaded.moves) == (std::vector<float>{1, 1, 1}));
    EXPECT_EQ(loaded.differs_remotely.has_value(), in_place);
    if (in_place) EXPECT_EQ(loaded.differs_remotely->rank, 1);
  }
  jcoll::LoadedPlan ring;
  EXPECT(!jcoll::LoadPlan(Ring(5), &ring));
  EXPECT_EQ(ring.moves.moves.size(), size_t{5});  // Folded.
  EXPECT(!ring.differs_remotely);
}

// An algorithm that is defined anew while its plan is made: the old plan is not kept.
TEST(PlansAreKeptUntilForgotten) {
  int num_made = 0;
  jcoll::SetPlanMaker([&num_made](const jcoll::PlanKey& key) {
    if (++num_made == 1) jcoll::ForgetPlans();
    const std::vector<int32_t> words = Encode(Ring(key.num_ranks));
    return std::string(reinterpret_cast<const char*>(words.data()), words.size() * 4);
  });
  for (int expected : {1, 2, 2}) {
    auto plan = jcoll::PlanFor({"all_reduce", "ring", 3, 0});
    EXPECT(std::holds_alternative<std::shared_ptr<const jcoll::LoadedPlan>>(plan));
    EXPECT_EQ(num_made, expected);
  }
  jcoll::SetPlanMaker(nullptr);
}

TEST(PlansThatCannotBeRun) {
  PlanMoves moves;
  PlanPrograms programs;
  auto error = [&](const Plan& plan) {
    auto a = jcoll::MakeMoves(plan, &moves), b = jcoll::MakePrograms(plan, &programs);
    EXPECT(a.has_value() && b.has_value());
    return a ? a->message : "";
  };
  EXPECT_CONTAINS(error(Make(PlanOp::kAllReduce, 2, 1, 0, {Recv(0, 1, kOut, 0)})),
                  "rank 0 waits for a message from rank 1 that is never sent");
  EXPECT_CONTAINS(
      error(Make(PlanOp::kAllReduce, 2, 1, 1, {Send(0, 1, kScratch, 0), Recv(1, 0, kOut, 0)})),
      "before it is written");
  EXPECT_CONTAINS(
      error(Make(PlanOp::kAllReduce, 2, 2, 0, {Send(0, 1, kIn, 1), Recv(1, 0, kOut, 0)})),
      "another length");
  EXPECT_CONTAINS(
      error(Make(PlanOp::kAllReduce, 2, 2, 0, {Send(0, 1, kIn, 0, 2), Recv(1, 0, kOut, 0)})),
      "sends 2 chunks");
}

// A value that goes to several peers has one slot; who makes what is sent writes the slot itself.
TEST(ProgramsStageOnce) {
  std::vector<PlanStep> steps = {Send(0, 1, kIn, 0), Send(0, 2, kIn, 0)};
  for (int r : {1, 2}) steps.push_back(Recv(r, 0, kOut, 0));
  PlanPrograms programs;
  EXPECT(!jcoll::MakePrograms(Make(PlanOp::kBroadcast, 3, 1, 0, steps), &programs));
  EXPECT_EQ(programs.ranks[0].num_slots, 1);
  EXPECT_EQ(programs.ranks[0].num_messages, 2);
  EXPECT_EQ(programs.ranks[0].receivers.size(), size_t{2});

  EXPECT(!jcoll::MakePrograms(Ring(3), &programs));
  for (const jcoll::RankProgram& rank : programs.ranks) {
    // 4 receives and one copy of the first chunk that is sent.
    EXPECT_EQ(rank.actions.size(), size_t{5});
    EXPECT_EQ(rank.num_slots, 4);
    EXPECT_EQ(rank.num_messages, 4);
  }
}

TEST(ProgramsOfAMap) {
  // An all_reduce: everybody stages its block, and reduces all three.
  const PlanPrograms p = jcoll::MakePrograms(3, 1, 1, {-2, -2, -2});
  EXPECT(p.reduces);
  EXPECT_EQ(p.max_slots, 1);
  EXPECT_EQ(p.ranks[1].actions.back().srcs.size(), size_t{3});
  // A permutation with a hole.
  const PlanPrograms q = jcoll::MakePrograms(3, 1, 1, {1, -1, 0});
  EXPECT_EQ(q.ranks[2].num_slots, 0);
  EXPECT_EQ(q.ranks[1].actions.back().srcs.size(), size_t{0});
}

TEST(ProgramsOfAMapDoFirstWhatNeedsNoPeer) {
  // An all_gather: rank 1 stages its block, puts it into its own output, and only then waits.
  const PlanPrograms p = jcoll::MakePrograms(3, 1, 3, {0, 1, 2, 0, 1, 2, 0, 1, 2});
  const auto& actions = p.ranks[1].actions;
  EXPECT_EQ(actions.size(), size_t{4});
  EXPECT_EQ(actions[0].has_chunk, false);
  EXPECT_EQ(actions[1].chunk, 1);
  EXPECT_EQ(actions[2].chunk, 0);
  EXPECT_EQ(actions[3].chunk, 2);
}

}  // namespace
