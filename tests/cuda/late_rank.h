// A rank that comes when its peers are about to give up, or have: one of its blocks is held in the
// emulator. When a peer's kernel is over, its program uses the buffers for something else.
#pragma once

#include <algorithm>
#include <chrono>
#include <functional>
#include <thread>

#include "cuda/emulator/language.h"
#include "tests/cuda/world.h"

namespace late_rank {

// Where the rank is held.
enum class Place {
  kOutside,  // It has seen no peer give up, and signals none yet.
  kInside,   // It has passed the first barrier, and reads and writes its peers' buffers next.
};

// Steps of a block until there: each thread looks whether any rank has given up, one of block 0
// whether another launch runs, and they meet; they meet, signal each peer, look for any that has
// given up and for its signal, once as that is there, and all but one are about to meet again.
inline int64_t StepsTo(Place place, int num_ranks, int block) {
  const int64_t num_threads = jcoll::emulator::Options().threads_per_block;
  const int64_t outside = 2 * num_threads + (block == 0 ? 1 : 0);
  if (place == Place::kOutside) return outside;
  return outside + num_threads + 3 * (num_ranks - 1) + num_threads - 1;
}

inline void Await(const std::function<bool()>& condition) {
  while (!condition()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

constexpr int kReused = 0x77;

// Runs the ranks' calls with block `block` of rank `late` held at `place` until its peers have
// failed: until their kernels are over if they can be, else until they say so. Expects what the
// buffers are used for afterwards to stay, and is_poisoned(rank) of all outputs.
template <typename IsPoisoned>
void Run(world::World* world, const std::vector<world::Call>& calls, const world::Buffers& input,
         const world::Buffers& output, int late, int block, Place place, IsPoisoned is_poisoned) {
  const int n = world->num_ranks();
  const auto multicast_input = input.MakeMulticast(), multicast_output = output.MakeMulticast();
  const auto launch = [&](int rank) {
    world::Call own = world->ForRank(calls[rank], rank, &input, &output);
    own.peers.multicast_input = multicast_input->address();
    own.peers.multicast_output = multicast_output->address();
    world->Launch(own);
  };
  const auto for_others = [n, late](const auto& f) {
    for (int r = 0; r < n; ++r) {
      if (r != late) f(r);
    }
  };
  for_others([&](int r) {
    launch(r);
    world->stream(r).Enqueue(1, [&, r] {
      if (threadIdx.x != 0) return;
      EXPECT(is_poisoned(r));
      std::memset(input[r], kReused, static_cast<size_t>(input.nbytes()));
      std::memset(output[r], kReused, static_cast<size_t>(output.nbytes()));
    });
  });
  const auto load = [](const uint32_t& word) { return __atomic_load_n(&word, __ATOMIC_RELAXED); };
  if (place == Place::kInside) {  // So that it need not look twice.
    for_others([&](int r) { Await([&] { return load(world->pad(late).inbox[block][r]) != 0; }); });
  }
  jcoll::emulator::HoldBlock(late, block, StepsTo(place, n, block));
  launch(late);
  for_others([&](int r) {
    if (place == Place::kOutside) world->stream(r).Synchronize();
    Await([&] { return load(world->error(r).state) == 2; });
  });
  jcoll::emulator::LetGo();
  world->Synchronize();
  EXPECT(is_poisoned(late));
  EXPECT_EQ(world->error(late).state, 2u);
  for_others([&](int r) {
    // The late rank has stored nothing there.
    EXPECT_EQ(std::count(output[r], output[r] + output.nbytes(), kReused), output.nbytes());
  });
}

}  // namespace late_rank
