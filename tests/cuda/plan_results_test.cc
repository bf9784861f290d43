// Every plan of the catalogue, and a user's own, by both protocols: the results are those of the
// ranks' programs on CPU, to the last bit, and of the op; and the bytes moved are the plan's.
#include "tests/cuda/plans.h"

namespace {

using namespace plans;
using elements::ForEachType;
using elements::RandomElements;
using jcoll::StepKind;

#ifdef __SANITIZE_THREAD__
constexpr int kEvery = 7;  // A tenth of the speed.
#else
constexpr int kEvery = 1;
#endif

// The op's own definition, for one element of a rank's output.
template <typename T>
T Promised(const Case& c, ReduceOp op, const std::vector<std::vector<T>>& inputs, int64_t count,
           int rank, int64_t i) {
  const bool is_root = rank == c.plan.root;
  const int64_t block = i / count, at = i % count;
  switch (c.plan.op) {
    case PlanOp::kAllReduce:
      return elements::Reference(op, inputs, i);
    case PlanOp::kReduceScatter:
      return elements::Reference(op, inputs, rank * count + i);
    case PlanOp::kReduce:
      return is_root ? elements::Reference(op, inputs, i) : T();
    case PlanOp::kAllGather:
      return inputs[block][at];
    case PlanOp::kGather:
      return is_root ? inputs[block][at] : T();
    case PlanOp::kAllToAll:
      return inputs[block][rank * count + at];
    case PlanOp::kBroadcast:
      return inputs[c.plan.root][i];
    case PlanOp::kScatter:
      return inputs[c.plan.root][rank * count + i];
  }
  return T();
}

// Whether the order of the operands does not matter.
template <typename T>
bool IsAssociative(ReduceOp op) {
  return std::is_integral_v<T> || op == ReduceOp::kMin || op == ReduceOp::kMax;
}

template <typename T>
bool IsRight(World* world, const Case& c, const Call& call, Random& random, int turn) {
  const int n = c.plan.num_ranks;
  const int64_t element_nbytes = sizeof(T);
  const int64_t input_count = c.input_count(call.count), output_count = c.output_count(call.count);
  const auto inputs = RandomElements<T>(n, input_count, random);
  Buffers input(n, input_count * element_nbytes, elements::Misalignments(turn, sizeof(T)));
  Buffers output(n, output_count * element_nbytes, elements::Misalignments(turn / 3, sizeof(T)));
  std::vector<Bytes> bytes;
  for (int r = 0; r < n; ++r) {
    input.Set(r, inputs[r]);
    const auto* first = reinterpret_cast<const uint8_t*>(inputs[r].data());
    bytes.emplace_back(first, first + input_count * element_nbytes);
  }
  output.Fill(0x5a);
  world->Run(call, &input, &output);
  world->ExpectNoErrors();
  const auto on_cpu = OnOneThread(c, call.dtype, call.reduce_op, call.count, bytes).Run();
  bool ok = true;
  for (int r = 0; r < n && ok; ++r) {
    ok = elements::ExpectElements<T>(output[r], output_count, [&](int64_t i) {
      T value;
      std::memcpy(&value, on_cpu[r].data() + i * element_nbytes, sizeof(T));
      return value;
    });
    if (c.reduces() && !IsAssociative<T>(call.reduce_op)) continue;
    ok = ok && elements::ExpectElements<T>(output[r], output_count, [&](int64_t i) {
           return Promised(c, call.reduce_op, inputs, call.count, r, i);
         });
  }
  return ok;
}

constexpr int64_t kCounts[] = {0, 1, 5, 67, 1031};
constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kProd};

template <typename T>
void Check(World* world, const Case& c, Kernel kernel, DType dtype, Random& random, int turn) {
  const ReduceOp op = kOps[turn % std::size(kOps)];
  const Call call = c.MakeCall(kernel, dtype, op, kCounts[turn % std::size(kCounts)]);
  if (IsRight<T>(world, c, call, random, turn)) return;
  EXPECT_EQ(c.name() + " by " + Name(kernel) + ", " + Name(dtype) + ", count " +
                std::to_string(call.count),
            "right");
}

// Each plan by both protocols; types, operations, sizes and ways to lie take turns.
void CheckRanks(int num_ranks) {
  world::UseThreads(2);
  World world(num_ranks);
  Random random(static_cast<uint32_t>(num_ranks));
  int turn = 0, num_checked = 0;
  for (const Case* c : OfRanks(num_ranks)) {
    for (Kernel kernel : kProtocols) {
      for (int repeat = 0; repeat < 5; ++repeat) {
        if (++turn % kEvery != 0) continue;
        ++num_checked;
        switch (turn % 4) {
          case 0:
            Check<float>(&world, *c, kernel, DType::kF32, random, turn);
            break;
          case 1:
            Check<jcoll::BFloat16>(&world, *c, kernel, DType::kBF16, random, turn);
            break;
          case 2:
            Check<int8_t>(&world, *c, kernel, DType::kS8, random, turn);
            break;
          case 3:
            Check<uint64_t>(&world, *c, kernel, DType::kU64, random, turn);
            break;
        }
      }
    }
  }
  EXPECT(num_checked > 200 / kEvery);
  world::UseThreads();
}

TEST(TwoRanks) { CheckRanks(2); }
TEST(ThreeRanks) { CheckRanks(3); }
TEST(FourRanks) { CheckRanks(4); }
TEST(FiveRanks) { CheckRanks(5); }
TEST(SixRanks) { CheckRanks(6); }
TEST(SevenRanks) { CheckRanks(7); }
TEST(EightRanks) { CheckRanks(8); }

// All dtypes that move or reduce, by an algorithm with partial sums. The 8-bit floats, which the
// CPU does not reduce, only move.
TEST(EveryType) {
  World world(4);
  Random random(4);
  int turn = 0;
  ForEachType([&](auto type) {
    using T = typename decltype(type)::Storage;
    for (Kernel kernel : kProtocols) {
      for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProd}) {
        const Case& ring = Find("ring", PlanOp::kAllReduce, 4);
        const Call call = ring.MakeCall(kernel, type.dtype, op, 85);
        const bool is_8_bit_float = type.dtype >= DType::kF8E4M3FN;
        if (is_8_bit_float || Refusal(world.ForRank(call, 0, nullptr, nullptr), {})) continue;
        EXPECT(IsRight<T>(&world, ring, call, random, turn++));
      }
      const Case& bruck = Find("bruck", PlanOp::kAllToAll, 4);
      const Call call = bruck.MakeCall(kernel, type.dtype, ReduceOp::kNone, 85);
      EXPECT(IsRight<T>(&world, bruck, call, random, turn++));
    }
  });
  EXPECT(turn > 100);
}

// More than the slots hold: several turns, in both halves.
TEST(SeveralTurns) {
  World world(3);
  Random random(3);
  for (const char* algorithm : {"ring", "tree", "relay"}) {
    const Case& c = Find(algorithm, PlanOp::kAllReduce, 3);
    for (Kernel kernel : kProtocols) {
      const int64_t per_chunk = kernel == Kernel::kPlanLL ? 15'000 : 300'001;
      Call call =
          c.MakeCall(kernel, DType::kF32, ReduceOp::kSum, c.plan.chunks_per_block * per_chunk);
      call.num_blocks = 1;
      EXPECT(jcoll::gpu::LanesOf(call, 1).num_turns >= 4);
      EXPECT(IsRight<float>(&world, c, call, random, 0));
    }
  }
}

// ---- Bytes, which only the emulator counts.

#ifdef JCOLL_EMULATOR

// What rank `rank` of a plan sends, in chunks.
int64_t ChunksSent(const Plan& plan, int rank) {
  int64_t chunks = 0;
  for (int32_t i = plan.first_step[rank]; i < plan.first_step[rank + 1]; ++i) {
    if (plan.steps[i].kind == StepKind::kSend) chunks += plan.steps[i].count;
  }
  return chunks;
}

void CheckTraffic(World* world, const Case& c) {
  constexpr int64_t kChunkNbytes = 256;
  const int n = c.plan.num_ranks;
  const int64_t count = c.plan.chunks_per_block * kChunkNbytes / 4;
  Buffers input(n, c.input_count(count) * 4), output(n, c.output_count(count) * 4);
  for (Kernel kernel : kProtocols) {
    const Call call = c.MakeCall(kernel, DType::kF32, ReduceOp::kSum, count);
    world::ResetTraffic();
    world->Run(call, &input, &output);
    for (int r = 0; r < n; ++r) {
      const world::Traffic traffic = world::TrafficOf(r);
      const int64_t sent = ChunksSent(c.plan, r) * kChunkNbytes;
      EXPECT_EQ(traffic.loaded, 0);
      EXPECT_EQ(traffic.stored, kernel == Kernel::kPlanLL ? 2 * sent : sent);
      if (c.plan.algorithm == "ring" && c.plan.op == PlanOp::kAllReduce) {
        EXPECT_EQ(sent, 2 * (n - 1) * count * 4 / n);
      }
    }
  }
}

TEST(Traffic) {
  for (int n : {2, 3, 5, 8}) {
    World world(n);
    for (const Case* c : OfRanks(n)) CheckTraffic(&world, *c);
  }
}
#endif

// ---- What is refused.

std::string RefusalOf(const Call& call) { return Refusal(call, {}).value_or(""); }

TEST(Refusals) {
  const Case& ring = Find("ring", PlanOp::kAllReduce, 4);
  const auto make = [&](Kernel kernel, int64_t count) {
    return ring.MakeCall(kernel, DType::kF32, ReduceOp::kSum, count);
  };
  EXPECT_EQ(RefusalOf(make(Kernel::kPlanSimple, int64_t{1} << 36)), "");
  EXPECT_EQ(RefusalOf(make(Kernel::kPlanLL, 65536)), "");
  EXPECT_CONTAINS(RefusalOf(make(Kernel::kPlanLL, 65537)), "serves chunks of up to 65536 bytes");
  Call call = make(Kernel::kPlanSimple, 8);
  call.program = nullptr;
  EXPECT_CONTAINS(RefusalOf(call), "needs the program of a plan");
  call = make(Kernel::kPlanSimple, 8);
  call.peers.num_ranks = 5;
  EXPECT_CONTAINS(RefusalOf(call), "got a plan for 4 ranks, not 5");
  call = make(Kernel::kPlanLL, 8);
  call.reduce_op = ReduceOp::kMean;
  EXPECT_CONTAINS(RefusalOf(call), "has no mean");
  call.reduce_op = ReduceOp::kNone;
  EXPECT_CONTAINS(RefusalOf(call), "has no none of float32");
  call = make(Kernel::kPlanLL, 8);
  call.num_blocks = 17;
  EXPECT_CONTAINS(RefusalOf(call), "runs in at most 16 thread blocks, not 17");
  PlanProgram large = ring.program;
  large.simple.num_slots = large.ll.num_slots = 5000;
  call = make(Kernel::kPlanLL, 8);
  call.program = &large;
  EXPECT_CONTAINS(RefusalOf(call), "has room for 4096 values that a rank is sent");
  call.kernel = Kernel::kPlanSimple;
  EXPECT_CONTAINS(RefusalOf(call), "has room for 2048 values that a rank is sent");
  large.simple.num_slots = 2048;
  large.simple.num_messages = 1 << 20;
  call.count = int64_t{1} << 36;
  EXPECT_CONTAINS(RefusalOf(call), "would count more than 2^31 messages");
  large.simple.num_messages = 0;
  call.count = int64_t{1} << 38;  // 2^31 turns of 128 bytes of each of 4 chunks.
  call.num_blocks = 1;
  EXPECT_CONTAINS(RefusalOf(call), "would count more than 2^31 messages");
}

}  // namespace
