// ragged_all_to_all: each row of each output, the bytes that were moved for it, and rows that are
// not there.
#include <numeric>

#include "tests/cuda/elements.h"

namespace {

using namespace world;
using elements::Bytes;
using elements::Random;
using elements::RandomBytes;

struct Plan {
  // [sender][receiver * updates + update]; rows.
  std::vector<std::vector<int64_t>> from, size, to;
  int64_t input_rows = 0, output_rows = 0;
};

// Sizes of 0 to 6 rows; rows are in any order at the sender, and at the receiver have gaps.
Plan RandomPlan(int n, int updates, Random& random) {
  Plan plan;
  plan.from = plan.size = plan.to =
      std::vector<std::vector<int64_t>>(n, std::vector<int64_t>(n * updates));
  std::vector<int64_t> sent(n), received(n);
  for (int s = 0; s < n; ++s) {
    std::vector<int> order(n * updates);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    for (int i : order) {
      const int64_t size = static_cast<int64_t>(random() % 7), gap = random() % 2;
      plan.size[s][i] = size;
      plan.from[s][i] = sent[s];
      plan.to[s][i] = received[i / updates] + gap;
      sent[s] += size;
      received[i / updates] += size + gap;
    }
  }
  plan.input_rows = *std::max_element(sent.begin(), sent.end());
  plan.output_rows = *std::max_element(received.begin(), received.end()) + 2;
  return plan;
}

// The arrays of one rank as the kernel wants them.
struct Arrays {
  std::vector<int64_t, Allocator<int64_t>> wide[3];
  std::vector<int32_t, Allocator<int32_t>> narrow[3];

  Arrays(const Plan& plan, int rank) {
    const std::vector<int64_t>* rows[] = {&plan.from[rank], &plan.size[rank], &plan.to[rank]};
    for (int k = 0; k < 3; ++k) {
      wide[k].assign(rows[k]->begin(), rows[k]->end());
      narrow[k].assign(rows[k]->begin(), rows[k]->end());
    }
  }
  const void* operator()(int k, bool is_int64) const {
    if (is_int64) return wide[k].data();
    return narrow[k].data();
  }
};

// Runs it on all ranks with output 0x5a before.
void RunPlan(World* world, const Plan& plan, const Buffers& input, const Buffers& output,
             int updates, int64_t row_nbytes, bool is_int64) {
  std::vector<Arrays> arrays;
  for (int r = 0; r < world->num_ranks(); ++r) arrays.emplace_back(plan, r);
  std::vector<Call> calls;
  for (int r = 0; r < world->num_ranks(); ++r) {
    Call call;
    call.kernel = Kernel::kRaggedAllToAll;
    call.dtype = DType::kU8;
    call.num_blocks = 2;
    call = world->ForRank(call, r, &input, &output);
    call.rows.input_offsets = arrays[r](0, is_int64);
    call.rows.send_sizes = arrays[r](1, is_int64);
    call.rows.output_offsets = arrays[r](2, is_int64);
    call.rows.is_int64 = is_int64;
    call.rows.updates_per_rank = updates;
    call.rows.row_nbytes = row_nbytes;
    call.rows.input_rows = plan.input_rows;
    call.rows.output_rows = plan.output_rows;
    calls.push_back(call);
  }
  ResetTraffic();
  for (const Call& call : calls) world->Launch(call);
  world->Synchronize();
}

std::vector<Bytes> ExpectedOutputs(const Plan& plan, const std::vector<Bytes>& inputs, int updates,
                                   int64_t row) {
  const int n = static_cast<int>(inputs.size());
  std::vector<Bytes> outputs(n, Bytes(plan.output_rows * row, 0x5a));
  for (int s = 0; s < n; ++s) {
    for (int i = 0; i < n * updates; ++i) {
      const auto begin = inputs[s].begin() + plan.from[s][i] * row;
      std::copy(begin, begin + plan.size[s][i] * row,
                outputs[i / updates].begin() + plan.to[s][i] * row);
    }
  }
  return outputs;
}

void CheckRandomPlans(int fewest_ranks, int most_ranks) {
  Random random(11);
  int turn = 0;
  for (int n = fewest_ranks; n <= most_ranks; ++n) {
    World world(n);
    for (int updates : {1, 3}) {
      for (int64_t row : {1, 4, 24, 130}) {
        const Plan plan = RandomPlan(n, updates, random);
        const auto inputs = RandomBytes(n, plan.input_rows * row, random);
        Buffers input(n, plan.input_rows * row, elements::Misalignments(turn, 1));
        Buffers output(n, plan.output_rows * row, elements::Misalignments(turn / 3, 1));
        for (int r = 0; r < n; ++r) input.Set(r, inputs[r]);
        output.Fill(0x5a);
        RunPlan(&world, plan, input, output, updates, row, turn++ % 2 == 0);
        world.ExpectNoErrors();
        const auto want = ExpectedOutputs(plan, inputs, updates, row);
        for (int r = 0; r < n; ++r) {
          EXPECT(elements::ExpectElements<uint8_t>(output[r], output.nbytes(),
                                                   [&](int64_t i) { return want[r][i]; }));
          int64_t to_others = 0;
          for (int i = 0; i < n * updates; ++i) {
            if (i / updates != r) to_others += plan.size[r][i] * row;
          }
          EXPECT_EQ(TrafficOf(r).stored, kIsEmulated ? to_others : 0);
          EXPECT_EQ(TrafficOf(r).loaded, 0);
        }
      }
    }
  }
}

TEST(RandomPlans) { CheckRandomPlans(2, 8); }
TEST(RandomPlansAlone) { CheckRandomPlans(1, 1); }

// Rank 1 sends rank 2 rows that are not there. Nobody stores outside (which AddressSanitizer would
// see), rank 1 sends nothing at all, and everybody knows who it was.
TEST(RowsOutside) {
  using jcoll::gpu::ErrorKind;
  const int64_t kLarge = int64_t{1} << 62;
  const struct {
    int64_t from, size, to;
    uint32_t expected, seen;
  } kCases[] = {{-1, 2, 0, 8, 1},
                {7, 2, 0, 8, 9},
                {0, -1, 0, 8, 0},
                {0, 1, 10, 10, 11},
                {0, 1, -1, 10, 0},
                {kLarge, 1, 0, 8, 0xffffffff},
                {0, 1, kLarge, 10, 0xffffffff}};
  for (const auto& c : kCases) {
    World world(3);
    Plan plan;
    plan.from = plan.size = plan.to =
        std::vector<std::vector<int64_t>>(3, std::vector<int64_t>(3, 1));
    for (int s = 0; s < 3; ++s) plan.to[s] = {3 * s, 3 * s, 3 * s};
    plan.input_rows = 8;
    plan.output_rows = 10;
    plan.from[1][2] = c.from;
    plan.size[1][2] = c.size;
    plan.to[1][2] = c.to;
    Buffers input(3, 8), output(3, 10);
    output.Fill(0x5a);
    RunPlan(&world, plan, input, output, 1, 1, /*is_int64=*/true);
    EXPECT_EQ(world.error(1).state, 2u);
    EXPECT(world.error(1).kind == ErrorKind::kRowsOutside);
    EXPECT_EQ(world.error(1).rank, 1);
    EXPECT_EQ(world.error(1).peer, 2);
    EXPECT_EQ(world.error(1).expected, c.expected);
    EXPECT_EQ(world.error(1).seen, c.seen);
    for (int r : {0, 2}) {
      EXPECT_EQ(world.error(r).state, 2u);
      EXPECT(world.error(r).kind == ErrorKind::kPeerGaveUp);
      EXPECT_EQ(world.error(r).peer, 1);
    }
    for (int r = 0; r < 3; ++r) {
      for (int i = 0; i < 10; ++i) {
        EXPECT(output[r][i] == '\xff');  // Also where good ranks have stored before.
      }
    }
  }
}

}  // namespace
