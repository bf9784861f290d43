#include "csrc/description.h"

#include <functional>

#include "tests/native/ranks.h"

namespace {

using jcoll::Description;
using jcoll::FailureCode;
using ranks::AllReduce;

std::string Problem(const Description& d) {
  const auto failure = d.Validate();
  if (!failure) return "";
  EXPECT_EQ(failure->code, FailureCode::kInvalidArgument);
  EXPECT_EQ(failure->message.rfind(d.Where() + ": ", 0), 0);  // Begins with where it happened.
  return failure->message;
}

TEST(WhereNamesTheCall) {
  Description d = AllReduce(4, 8, "train/step.py:42");
  EXPECT_EQ(d.Where(),
            "jcoll.all_reduce over axis 'x' (int32[8], direct) called at train/step.py:42");
  d.call_site = "";
  EXPECT_EQ(d.Where(), "jcoll.all_reduce over axis 'x' (int32[8], direct)");
}

TEST(GroupsAreCounted) {
  Description d = AllReduce(5, 1, "");
  EXPECT_EQ(d.num_groups(), 1);
  EXPECT_EQ(d.group_size(0), 5);
  d.group_of = {0, 1, 0, 1, 0};
  d.rank_of = {0, 0, 1, 1, 2};
  EXPECT_EQ(d.num_groups(), 2);
  EXPECT_EQ(d.group_size(0), 3);
  EXPECT_EQ(d.group_size(1), 2);
  EXPECT_EQ(Problem(d), "");
}

TEST(DamagedProgramsAreRefused) {
  struct {
    const char* text;
    std::function<void(Description*)> damage;
  } cases[] = {
      {"axis_size < 1", [](Description* d) { d->axis_size = 0; }},
      {"group_of and rank_of differ", [](Description* d) { d->group_of = {0, 0, 0, 0}; }},
      {"does not cover the axis", [](Description* d) { d->group_of = d->rank_of = {0}; }},
      {"out of range",
       [](Description* d) { d->group_of = {0, 0, 0, 4}, d->rank_of = {0, 1, 2, 0}; }},
      {"out of range",
       [](Description* d) { d->group_of = {0, 0, 1, 1}, d->rank_of = {0, 2, 0, 1}; }},
      {"out of range",
       [](Description* d) { d->group_of = {-1, 0, 0, 0}, d->rank_of = {0, 0, 1, 2}; }},
      {"two positions",
       [](Description* d) { d->group_of = {0, 0, 1, 1}, d->rank_of = {0, 0, 0, 1}; }},
      {"sizes < 0", [](Description* d) { d->block_nbytes = -4; }},
      {"sizes < 0", [](Description* d) { d->in_blocks = -1; }},
      {"source_map is too short", [](Description* d) { d->source_map.pop_back(); }},
      {"block that does not exist", [](Description* d) { d->source_map[1] = 4; }},
      {"block that does not exist", [](Description* d) { d->source_map[1] = -3; }},
      {"block that does not exist", [](Description* d) { d->source_map[1] = INT64_MIN; }},
      {"block that does not exist", [](Description* d) { d->source_map[1] = 0, d->in_blocks = 0; }},
      {"block that does not exist",  // Block 3 exists in the large group only.
       [](Description* d) {
         d->group_of = {0, 0, 0, 1}, d->rank_of = {0, 1, 2, 0};
         d->source_map = {1, 1, 1, 1};
       }},
      {"does not exist for this dtype",
       [](Description* d) { d->reduce_op = jcoll::ReduceOp::kMean; }},
      {"does not exist for this dtype", [](Description* d) { d->block_nbytes = 6; }},
      {"negative row counts",
       [](Description* d) { d->motion = jcoll::Motion::kRagged, d->out_rows = -1; }},
      {"negative row counts",
       [](Description* d) { d->motion = jcoll::Motion::kVariable, d->num_updates = 0; }},
      {"index_nbytes",
       [](Description* d) { d->motion = jcoll::Motion::kVariable, d->index_nbytes = 2; }},
  };
  EXPECT_EQ(Problem(AllReduce(4, 8, "")), "");
  for (const auto& c : cases) {
    Description d = AllReduce(4, 8, "");
    c.damage(&d);
    EXPECT_CONTAINS(Problem(d), c.text);
  }
}

TEST(RanksInSeveralProcessesAddInOneOrder) {
  auto plan = std::make_shared<jcoll::LoadedPlan>();
  plan->moves.num_ranks = 4;
  plan->moves.reduces = true;
  Description d = AllReduce(4, 8, "");
  d.plans.push_back(plan);
  plan->differs_remotely = {2, jcoll::PlanBuffer::kOutput, 5};
  EXPECT_EQ(Problem(d), "");
  d.process_of = {0, 0, 1, 1};
  EXPECT_CONTAINS(Problem(d), "rank 2 would add its output[5] in another order than rank 0");
}

// Four ranks that exchange rows by a plan.
Description Rows(std::function<void(std::vector<jcoll::RankProgram>*)> damage) {
  std::vector<int64_t> exchange;
  for (int64_t r = 0; r < 4; ++r) {
    for (int64_t b = 0; b < 4; ++b) exchange.push_back(b * 4 + r);
  }
  auto plan = std::make_shared<jcoll::LoadedPlan>();
  plan->programs = jcoll::MakePrograms(4, 4, 4, exchange);
  damage(&plan->programs.ranks);
  Description d = AllReduce(4, 8, "");
  d.motion = jcoll::Motion::kVariable;
  d.plans.push_back(std::move(plan));
  return d;
}

// How a program moves rows is told from the ranks alone: one that relays, or that cuts blocks,
// would move others than it says.
TEST(RowsFollowOnlyPlansOfWholeBlocks) {
  using Ranks = std::vector<jcoll::RankProgram>;
  EXPECT_EQ(Problem(Rows([](Ranks*) {})), "");
  const std::function<void(Ranks*)> cases[] = {
      // Of the programs' actions the first three send, the last four receive or keep.
      [](Ranks* r) { (*r)[0].actions[1].srcs[0] = (*r)[0].actions[3 + 1].srcs[0]; },  // Relays.
      [](Ranks* r) { (*r)[0].actions[0].has_chunk = true; },
      [](Ranks* r) { (*r)[1].actions[3].buffer = jcoll::PlanBuffer::kScratch; },
      [](Ranks* r) { (*r)[1].actions[3].chunk = 2; },
      [](Ranks* r) { (*r)[2].origins[0].reset(); },
      [](Ranks* r) { (*r)[2].origins[0]->chunk = 3; },
      [](Ranks* r) { (*r)[3].actions.pop_back(); },
      [](Ranks* r) { (*r)[3].actions.back().srcs.clear(); },
  };
  for (const auto& damage : cases) {
    EXPECT_CONTAINS(Problem(Rows(damage)), "does not send every block as a whole");
  }
  Description d = Rows([](Ranks*) {});
  d.plans.push_back(d.plans[0]);
  EXPECT_CONTAINS(Problem(d), "a plan is missing");
}

}  // namespace
