// Every kernel that only moves data: each byte of each output, and nothing beside it.
#include "tests/cuda/elements.h"

namespace {

using namespace world;
using elements::Bytes;
using elements::Random;
using elements::RandomBytes;

constexpr int64_t kCounts[] = {0, 1, 3, 17, 255, 4097};

Call MakeCall(Kernel kernel, int64_t count, int root = 0) {
  Call call;
  call.kernel = kernel;
  call.dtype = DType::kU8;
  call.count = count;
  call.root = root;
  call.num_blocks = 2;
  return call;
}

// Runs it, and expects output[r] to be expected(r), whose bytes tell where they belong.
template <typename Expected>
void Check(World* world, const Call& call, const std::vector<Bytes>& inputs, int64_t output_nbytes,
           int turn, Expected expected) {
  const int n = world->num_ranks();
  Buffers input(n, static_cast<int64_t>(inputs[0].size()), elements::Misalignments(turn, 1));
  Buffers output(n, output_nbytes, elements::Misalignments(turn / 3, 1 << turn % 4));
  for (int r = 0; r < n; ++r) input.Set(r, inputs[r]);
  output.Fill(0x5a);
  world->Run(call, &input, &output);
  world->ExpectNoErrors();
  for (int r = 0; r < n; ++r) {
    const Bytes want = expected(r);
    EXPECT_EQ(static_cast<int64_t>(want.size()), output_nbytes);
    EXPECT(elements::ExpectElements<uint8_t>(output[r], output_nbytes,
                                             [&](int64_t i) { return want[i]; }));
    EXPECT(elements::ExpectElements<uint8_t>(input[r], input.nbytes(),
                                             [&](int64_t i) { return inputs[r][i]; }));
  }
}

Bytes Block(const Bytes& bytes, int64_t begin, int64_t size) {
  return Bytes(bytes.begin() + begin, bytes.begin() + begin + size);
}
void Append(const Bytes& block, Bytes* to) { to->insert(to->end(), block.begin(), block.end()); }

template <typename F>
void ForRanksAndCounts(F f) {
  Random random(7);
  int turn = 0;
  for (int n = 1; n <= 8; ++n) {
    World world(n);
    for (int64_t count : kCounts) {
      for (int way = 0; way < 4; ++way) f(&world, count, random, turn++);
    }
  }
}

TEST(AllGather) {
  ForRanksAndCounts([](World* world, int64_t count, Random& random, int turn) {
    const int n = world->num_ranks();
    const auto inputs = RandomBytes(n, count, random);
    Bytes want;
    for (const Bytes& input : inputs) Append(input, &want);
    Check(world, MakeCall(Kernel::kAllGather, count), inputs, n * count, turn,
          [&](int) { return want; });
  });
}

TEST(AllToAll) {
  ForRanksAndCounts([](World* world, int64_t count, Random& random, int turn) {
    const int n = world->num_ranks();
    const auto inputs = RandomBytes(n, n * count, random);
    Check(world, MakeCall(Kernel::kAllToAll, count), inputs, n * count, turn, [&](int r) {
      Bytes want;
      for (const Bytes& input : inputs) Append(Block(input, r * count, count), &want);
      return want;
    });
  });
}

TEST(Broadcast) {
  ForRanksAndCounts([](World* world, int64_t count, Random& random, int turn) {
    const auto inputs = RandomBytes(world->num_ranks(), count, random);
    const int root = turn % world->num_ranks();
    Check(world, MakeCall(Kernel::kBroadcast, count, root), inputs, count, turn,
          [&](int) { return inputs[root]; });
  });
}

void CheckInPlace(std::initializer_list<int> groups) {
  for (int n : groups) {
    World world(n);
    Random random(3);
    const auto inputs = RandomBytes(n, 1000, random);
    Buffers buffer(n, 1000);
    for (int r = 0; r < n; ++r) buffer.Set(r, inputs[r]);
    world.Run(MakeCall(Kernel::kBroadcast, 1000, n - 1), &buffer, &buffer);
    for (int r = 0; r < n; ++r) EXPECT_EQ(std::memcmp(buffer[r], inputs[n - 1].data(), 1000), 0);

    // Each rank's input is its block of the output.
    Buffers gathered(n, n * 1000);
    std::vector<Call> calls;
    for (int r = 0; r < n; ++r) {
      std::memcpy(gathered[r] + r * 1000, inputs[r].data(), 1000);
      calls.push_back(world.ForRank(MakeCall(Kernel::kAllGather, 1000), r, nullptr, &gathered));
      calls[r].peers.input[r] = gathered[r] + r * 1000;
    }
    for (const Call& call : calls) world.Launch(call);
    world.Synchronize();
    for (int r = 0; r < n; ++r) {
      for (int p = 0; p < n; ++p) {
        EXPECT_EQ(std::memcmp(gathered[r] + p * 1000, inputs[p].data(), 1000), 0);
      }
    }
    world.ExpectNoErrors();
  }
}

TEST(InPlace) { CheckInPlace({2, 5}); }
TEST(AloneInPlace) { CheckInPlace({1}); }

// What one rank has before a barrier, every rank has after it.
TEST(Barrier) {
  World world(4);
  for (int round = 0; round < 20; ++round) {
    world.Run(MakeCall(Kernel::kBarrier, 0), nullptr, nullptr);
    world.ExpectNoErrors();
    for (int r = 0; r < 4; ++r) EXPECT_EQ(world.pad(r).calls, static_cast<uint32_t>(round + 1));
  }
}

}  // namespace
