// A site: every op as a source map, against plain loops; then the matching of ranks.
#include "csrc/site.h"

#include <algorithm>
#include <memory>
#include <random>

#include "tests/native/ranks.h"

namespace {

using jcoll::Description;
using jcoll::RankBuffers;
using jcoll::Site;
using ranks::AllReduce;
using ranks::Buffer;
using ranks::OnThreads;
using ranks::Outcome;
using ranks::Sum;
using ranks::Watchdog;

using Ints = std::vector<int32_t>;
using Blocks = std::vector<std::vector<Ints>>;  // [rank][block][element]

constexpr int kZero = -1;
constexpr int Reduced(int block) { return -2 - block; }

// An op: its source map, and what it means in loops over blocks that do not know of source maps.
struct Op {
  const char* name;
  std::function<int(int n)> in_blocks, out_blocks;
  std::function<int(int n, int rank, int block)> source;
  std::function<Ints(const Blocks& in, int n, int rank, int block)> meaning;
};

Ints Total(const Blocks& in, int block) {
  Ints total(in[0][block].size(), 0);
  for (const auto& rank : in) {
    for (size_t i = 0; i < total.size(); ++i) total[i] += rank[block][i];
  }
  return total;
}
Ints Zeros(const Blocks& in) { return Ints(in[0][0].size(), 0); }

int One(int) { return 1; }
int Same(int n) { return n; }

const Op kOps[] = {
    {"all_reduce", One, One, [](int, int, int) { return Reduced(0); },
     [](const Blocks& in, int, int, int) { return Total(in, 0); }},
    {"reduce_scatter", Same, One, [](int, int rank, int) { return Reduced(rank); },
     [](const Blocks& in, int, int rank, int) { return Total(in, rank); }},
    {"all_gather", One, Same, [](int, int, int block) { return block; },
     [](const Blocks& in, int, int, int block) { return in[block][0]; }},
    {"all_to_all", Same, Same, [](int n, int rank, int block) { return block * n + rank; },
     [](const Blocks& in, int, int rank, int block) { return in[block][rank]; }},
    {"broadcast", One, One, [](int n, int, int) { return n / 2; },
     [](const Blocks& in, int n, int, int) { return in[n / 2][0]; }},
    {"reduce", One, One, [](int n, int rank, int) { return rank == n - 1 ? Reduced(0) : kZero; },
     [](const Blocks& in, int n, int rank, int) {
       return rank == n - 1 ? Total(in, 0) : Zeros(in);
     }},
    {"gather", One, Same, [](int, int rank, int block) { return rank == 0 ? block : kZero; },
     [](const Blocks& in, int, int rank, int block) {
       return rank == 0 ? in[block][0] : Zeros(in);
     }},
    {"scatter", Same, One, [](int n, int rank, int) { return n / 2 * n + rank; },
     [](const Blocks& in, int n, int rank, int) { return in[n / 2][rank]; }},
    // Rank 0 receives nothing; the others their lower neighbour's.
    {"permute", One, One, [](int, int rank, int) { return rank == 0 ? kZero : rank - 1; },
     [](const Blocks& in, int, int rank, int) { return rank == 0 ? Zeros(in) : in[rank - 1][0]; }},
};

Description Describe(const Op& op, int n, int64_t count) {
  Description d = AllReduce(n, count, "site_test.cc:1");
  d.op = op.name;
  d.in_blocks = op.in_blocks(n);
  d.out_blocks = op.out_blocks(n);
  d.source_map.clear();
  for (int rank = 0; rank < n; ++rank) {
    for (int b = 0; b < d.out_blocks; ++b) d.source_map.push_back(op.source(n, rank, b));
  }
  const auto failure = d.Validate();
  EXPECT_EQ(failure ? failure->message : "", "");
  return d;
}

Blocks RandomBlocks(int n, int num_blocks, int64_t count) {
  static std::mt19937 random(7);
  Blocks blocks(n, std::vector<Ints>(num_blocks, Ints(count)));
  for (auto& rank : blocks) {
    for (Ints& block : rank) {
      for (int32_t& v : block) v = static_cast<int32_t>(random() % 1000000);
    }
  }
  return blocks;
}

Ints Joined(const std::vector<Ints>& blocks) {
  Ints all;
  for (const Ints& block : blocks) all.insert(all.end(), block.begin(), block.end());
  return all;
}

struct Layout {
  bool in_place = false;
  int misalign = 0;
};

// One rank's buffers for a collective over blocks.
struct RankMemory {
  RankMemory(const Ints& input, int64_t out_nbytes, Layout layout)
      : in(input, layout.misalign), out(out_nbytes, layout.misalign), in_place(layout.in_place) {}
  RankBuffers buffers() {
    RankBuffers b;
    b.inputs[0] = in.data();
    b.outputs[0] = in_place ? in.data() : out.data();
    return b;
  }
  Ints result() const { return (in_place ? in : out).Values<int32_t>(); }
  Buffer in, out;
  bool in_place;
};

void ExpectMeaning(const Op& op, int n, int64_t count, Layout layout = {}) {
  Site site(Describe(op, n, count));
  const Blocks in = RandomBlocks(n, op.in_blocks(n), count);
  std::vector<std::unique_ptr<RankMemory>> memory;
  for (int rank = 0; rank < n; ++rank) {
    memory.push_back(
        std::make_unique<RankMemory>(Joined(in[rank]), op.out_blocks(n) * count * 4, layout));
  }
  Outcome outcome(n);
  OnThreads(n, [&](int rank) { site.Arrive(1, rank, memory[rank]->buffers(), outcome.Of(rank)); });
  outcome.ExpectSuccess();
  for (int rank = 0; rank < n; ++rank) {
    std::vector<Ints> expected;
    for (int b = 0; b < op.out_blocks(n); ++b) expected.push_back(op.meaning(in, n, rank, b));
    const bool right = memory[rank]->result() == Joined(expected);
    check::Report(right, __FILE__, __LINE__,
                  std::string("the right result of ") + op.name + " on rank " +
                      std::to_string(rank) + " of " + std::to_string(n) + ", count " +
                      std::to_string(count));
    EXPECT(memory[rank]->in.GuardsAreIntact());
    EXPECT(memory[rank]->out.GuardsAreIntact());
    if (!layout.in_place) EXPECT(memory[rank]->in.Values<int32_t>() == Joined(in[rank]));
  }
}

TEST(EveryOpAtEverySize) {
  Watchdog watchdog;
  for (const Op& op : kOps) {
    for (int n : {1, 2, 3, 8}) {
      for (int64_t count : {0, 1, 7, 1000}) ExpectMeaning(op, n, count);
    }
  }
}

// Beyond 256 KiB of traffic the work is cut up and shared with the pool; beyond 24 MiB, or
// 32 MiB of copies, it bypasses the cache.
TEST(EveryOpInParallel) {
  Watchdog watchdog;
  for (const Op& op : kOps) {
    ExpectMeaning(op, 8, 30011);
    ExpectMeaning(op, 3, 200003);
  }
  ExpectMeaning(kOps[0], 4, 1 << 20);
  ExpectMeaning(kOps[3], 5, 300001);
}

TEST(EveryOpOnMisalignedPointers) {
  Watchdog watchdog;
  for (const Op& op : kOps) {
    for (int misalign : {1, 2, 7, 63}) ExpectMeaning(op, 3, 1001, {false, misalign});
    ExpectMeaning(op, 3, 100003, {false, 5});
  }
}

TEST(InPlaceOutputs) {
  Watchdog watchdog;
  for (const Op& op : kOps) {
    const std::string name = op.name;
    if (name != "all_reduce" && name != "broadcast") continue;
    for (int64_t count : {0, 1, 1000, 100003}) ExpectMeaning(op, 4, count, {true, 0});
    ExpectMeaning(op, 8, 50001, {true, 3});
  }
}

// Splits positions 0..7 into {5, 0, 3}, {1}, {7, 6, 4, 2}.
Description Uneven() {
  Description d = AllReduce(8, 1, "site_test.cc:2");
  d.group_of = {0, 1, 2, 0, 2, 0, 2, 2};
  d.rank_of = {1, 0, 3, 2, 2, 0, 1, 0};
  EXPECT(!d.Validate());
  return d;
}

// Every position brings 10^position: the digits of a sum are the members of the group.
void ExpectGroupSums(Site* site, int axis_size, int num_mesh_groups,
                     const std::vector<int>& expected) {
  const int n = axis_size * num_mesh_groups;
  Ints in(n), out(n, -1);
  Outcome outcome(n);
  OnThreads(n, [&](int position) {
    in[position] = position / axis_size + 1;
    for (int i = 0; i < position % axis_size; ++i) in[position] *= 10;
    RankBuffers b;
    b.inputs[0] = &in[position];
    b.outputs[0] = &out[position];
    site->Arrive(1, position, b, outcome.Of(position));
  });
  outcome.ExpectSuccess();
  for (int i = 0; i < n; ++i) EXPECT_EQ(out[i], expected[i % axis_size] * (i / axis_size + 1));
}

TEST(UnevenGroups) {
  Watchdog watchdog;
  Site site(Uneven());
  ExpectGroupSums(&site, 8, 1,
                  {101001, 10, 11010100, 101001, 11010100, 101001, 11010100, 11010100});
}

TEST(UniformGroups) {
  Watchdog watchdog;
  Description d = AllReduce(6, 1, "site_test.cc:3");
  d.group_of = {0, 1, 0, 1, 0, 1};
  d.rank_of = {0, 0, 1, 1, 2, 2};
  Site site(d);
  ExpectGroupSums(&site, 6, 1, {10101, 101010, 10101, 101010, 10101, 101010});
}

// A 4x3 mesh, collective over the last axis: 4 groups that must not mix; with and without groups
// inside the axis.
TEST(MeshGroups) {
  Watchdog watchdog;
  Site whole(AllReduce(3, 1, "site_test.cc:4"));
  ExpectGroupSums(&whole, 3, 4, {111, 111, 111});
  Description d = AllReduce(3, 1, "site_test.cc:5");
  d.group_of = {0, 1, 0};
  d.rank_of = {1, 0, 0};
  Site split(d);
  ExpectGroupSums(&split, 3, 4, {101, 10, 101});
}

// Runs, thousands at once.
TEST(ManyRunsInFlight) {
  Watchdog watchdog;
  constexpr int kRuns = 3000, kRanks = 4;
  Site site(AllReduce(kRanks, 1, "site_test.cc:6"));
  std::vector<std::unique_ptr<Sum>> sums;
  for (int run = 0; run < kRuns; ++run) sums.push_back(std::make_unique<Sum>(kRanks));
  std::vector<std::pair<int, int>> arrivals;
  for (int run = 0; run < kRuns; ++run) {
    for (int rank = 0; rank < kRanks; ++rank) arrivals.push_back({run, rank});
  }
  std::shuffle(arrivals.begin(), arrivals.end(), std::mt19937(3));
  OnThreads(3, [&](int thread) {
    for (size_t i = thread; i < arrivals.size(); i += 3) {
      const auto [run, rank] = arrivals[i];
      sums[run]->Arrive(&site, run, rank, run * 10 + rank);
    }
  });
  for (int run = 0; run < kRuns; ++run) sums[run]->Expect(run * 40 + 6);
}

// Independent collectives of one program may come in any order on any rank.
TEST(TwoSitesInOppositeOrder) {
  Watchdog watchdog;
  Site a(AllReduce(2, 1, "site_test.cc:7")), b(AllReduce(2, 1, "site_test.cc:7"));
  for (int run = 0; run < 500; ++run) {
    Sum at_a(2), at_b(2);
    OnThreads(2, [&](int rank) {
      Site* sites[] = {&a, &b};
      Sum* sums[] = {&at_a, &at_b};
      for (int i : {rank, 1 - rank}) sums[i]->Arrive(sites[i], run, rank, 10 * i + rank + 1);
    });
    at_a.Expect(3);
    at_b.Expect(23);
  }
}

// The k-th visit of one rank meets the k-th of the others.
TEST(RankComesAgainWhileTheFirstIsOpen) {
  Watchdog watchdog;
  Site site(AllReduce(3, 1, "site_test.cc:8"));
  std::vector<std::unique_ptr<Sum>> visits;
  for (int k = 0; k < 5; ++k) visits.push_back(std::make_unique<Sum>(3));
  for (int rank : {1, 0, 2}) {
    for (int k = 0; k < 5; ++k) visits[k]->Arrive(&site, 1, rank, 100 * k + rank);
  }
  for (int k = 0; k < 5; ++k) visits[k]->Expect(300 * k + 3);
}

TEST(SiteDiesWithRunsOpen) {
  Watchdog watchdog;
  Sum sum(2);
  {
    Site site(AllReduce(2, 1, "site_test.cc:9"));
    sum.Arrive(&site, 1, 0, 5);
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_EQ(sum.outcome.num_done(), 0);
  EXPECT_EQ(sum.out[0], -1);
}

}  // namespace
