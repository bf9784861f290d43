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

}  // namespace
