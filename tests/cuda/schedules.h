// What the tests of schedules share: many calls on the same pads with random delays everywhere,
// each between a write of its input and a check of its output.
#pragma once

#include <functional>
#include <utility>

#include "cuda/emulator/language.h"
#include "tests/cuda/world.h"

namespace schedules {

// Runs `body` on the host in stream order: a kernel of one thread.
inline void OnRank(world::World* world, int rank, std::function<void()> body) {
  world->stream(rank).Enqueue(1, [body = std::move(body)] {
    if (threadIdx.x == 0) body();
  });
}

// Random calls of a Program made by make(&world), with delays by `options`. `lines`: the counter of
// exchanges by lines that its calls use.
template <typename Make>
void RunSeed(int num_ranks, int num_rounds, const jcoll::emulator::Options& options,
             uint32_t (jcoll::gpu::SignalPad::*lines)[jcoll::gpu::kMaxBlocks], Make make) {
  jcoll::emulator::SetOptions(options);
  {
    world::World world(num_ranks);
    world.StartNearWrap();
    auto program = make(&world);
    for (int round = 0; round < num_rounds; ++round) program->Enqueue(round);
    world.Synchronize();
    world.ExpectNoErrors();
    for (int r = 0; r < num_ranks; ++r) {
      EXPECT_EQ(world.pad(r).calls, static_cast<uint32_t>(num_rounds));
      EXPECT(static_cast<int32_t>(world.pad(r).epoch[0]) > 0);     // It has wrapped,
      EXPECT(static_cast<int32_t>((world.pad(r).*lines)[0]) > 0);  // and so has this.
      EXPECT_EQ(world.pad(r).epoch[0], world.pad(0).epoch[0]);
      EXPECT_EQ((world.pad(r).*lines)[0], (world.pad(0).*lines)[0]);
    }
  }
  jcoll::emulator::SetOptions({});
}

}  // namespace schedules
