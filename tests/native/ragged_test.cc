// ragged_all_to_all, all_to_all_v and its transpose, against loops over rows; and every way in
// which what the ranks bring can fail to fit together.
#include <algorithm>
#include <memory>
#include <random>

#include "csrc/site.h"
#include "tests/native/ranks.h"

namespace {

using jcoll::Description;
using jcoll::Motion;
using jcoll::RankBuffers;
using jcoll::Site;
using ranks::Buffer;
using ranks::OnThreads;
using ranks::Outcome;
using ranks::Watchdog;

using Ints = std::vector<int32_t>;
using Table = std::vector<Ints>;  // [rank][...]

constexpr int kWidth = 3;  // Numbers of int32 in a row.

Description Describe(Motion motion, int num_ranks, int64_t in_rows, int64_t out_rows) {
  Description d = ranks::AllReduce(num_ranks, 1, "ragged_test.cc:1");
  d.op = motion == Motion::kRagged ? "ragged_all_to_all" : "all_to_all_v";
  d.signature = "int32[" + std::to_string(in_rows) + ",3]";
  d.motion = motion;
  d.row_nbytes = kWidth * 4;
  d.in_rows = in_rows;
  d.out_rows = out_rows;
  EXPECT(!d.Validate());
  return d;
}

// Rows whose numbers say where they come from.
Ints Rows(int rank, int64_t num_rows, int32_t tag) {
  Ints rows;
  for (int64_t row = 0; row < num_rows; ++row) {
    for (int i = 0; i < kWidth; ++i) {
      rows.push_back(tag + rank * 100000 + static_cast<int32_t>(row) * kWidth + i);
    }
  }
  return rows;
}

void CopyRow(const Ints& from, int64_t from_row, Ints* to, int64_t to_row) {
  for (int i = 0; i < kWidth; ++i) (*to)[to_row * kWidth + i] = from[from_row * kWidth + i];
}

// The buffers of one rank, inputs and outputs, in the order of RankBuffers.
struct RankMemory {
  std::vector<std::unique_ptr<Buffer>> in, out;
  int aliased_input = -1;  // The input that output 0 shares its memory with.

  void AddIndex(const Ints& values, int index_nbytes) {
    if (index_nbytes == 4) {
      in.push_back(std::make_unique<Buffer>(values, 1));
    } else {
      in.push_back(std::make_unique<Buffer>(std::vector<int64_t>(values.begin(), values.end()), 1));
    }
  }
  RankBuffers buffers() {
    RankBuffers b;
    for (size_t i = 0; i < in.size(); ++i) b.inputs[i] = in[i]->data();
    for (size_t i = 0; i < out.size(); ++i) b.outputs[i] = out[i]->data();
    if (aliased_input >= 0) b.outputs[0] = in[aliased_input]->data();
    return b;
  }
  Ints rows() const {
    return (aliased_input >= 0 ? *in[aliased_input] : *out[0]).Values<int32_t>();
  }
  Ints index(int output, int index_nbytes) const {
    if (index_nbytes == 4) return out[output]->Values<int32_t>();
    const auto wide = out[output]->Values<int64_t>();
    return Ints(wide.begin(), wide.end());
  }
  void ExpectGuards() {
    for (auto& b : in) EXPECT(b->GuardsAreIntact());
    for (auto& b : out) EXPECT(b->GuardsAreIntact());
  }
};

// Runs one collective; returns its error, which must be the same on all ranks.
std::string Run(const Description& d, std::vector<RankMemory>* memory) {
  Site site(d);
  const int n = d.axis_size;
  Outcome outcome(n);
  OnThreads(n,
            [&](int rank) { site.Arrive(1, rank, (*memory)[rank].buffers(), outcome.Of(rank)); });
  for (int rank = 0; rank < n; ++rank) {
    EXPECT_EQ(outcome.Error(rank), outcome.Error(0));
    (*memory)[rank].ExpectGuards();
  }
  return outcome.Error(0);
}

// What the ranks bring to ragged_all_to_all: tables [rank][peer * num_updates + update].
struct Ragged {
  int num_ranks, num_updates, in_rows, out_rows;
  Table input_offsets, send_sizes, output_offsets, recv_sizes;
};

std::vector<RankMemory> MemoryFor(const Ragged& r, int index_nbytes, bool in_place) {
  std::vector<RankMemory> memory(r.num_ranks);
  for (int rank = 0; rank < r.num_ranks; ++rank) {
    RankMemory& m = memory[rank];
    m.in.push_back(std::make_unique<Buffer>(Rows(rank, r.in_rows, 1000000), 4));
    m.in.push_back(std::make_unique<Buffer>(Rows(rank, r.out_rows, -50000000)));
    for (const Table* table : {&r.input_offsets, &r.send_sizes, &r.output_offsets, &r.recv_sizes}) {
      m.AddIndex((*table)[rank], index_nbytes);
    }
    m.out.push_back(std::make_unique<Buffer>(r.out_rows * kWidth * 4));
    if (in_place) m.aliased_input = 1;
  }
  return memory;
}

std::string RunRagged(const Ragged& r, std::vector<RankMemory>* memory, int index_nbytes = 4) {
  Description d = Describe(Motion::kRagged, r.num_ranks, r.in_rows, r.out_rows);
  d.num_updates = r.num_updates;
  d.index_nbytes = index_nbytes;
  return Run(d, memory);
}

void ExpectRagged(const Ragged& r, int index_nbytes, bool in_place) {
  auto memory = MemoryFor(r, index_nbytes, in_place);
  EXPECT_EQ(RunRagged(r, &memory, index_nbytes), "");
  for (int dst = 0; dst < r.num_ranks; ++dst) {
    Ints expected = Rows(dst, r.out_rows, -50000000);
    for (int src = 0; src < r.num_ranks; ++src) {
      const Ints rows = Rows(src, r.in_rows, 1000000);
      for (int j = dst * r.num_updates; j < (dst + 1) * r.num_updates; ++j) {
        for (int i = 0; i < r.send_sizes[src][j]; ++i) {
          CopyRow(rows, r.input_offsets[src][j] + i, &expected, r.output_offsets[src][j] + i);
        }
      }
    }
    EXPECT(memory[dst].rows() == expected);
  }
}

// Random updates: any input range, output ranges disjoint with gaps in any order, some empty.
Ragged RandomRagged(int n, int num_updates, int max_size, unsigned seed) {
  std::mt19937 random(seed);
  const int per_rank = n * num_updates;
  Ragged r{n, num_updates, max_size + 5, per_rank * (max_size + 2), {}, {}, {}, {}};
  for (Table* t : {&r.input_offsets, &r.send_sizes, &r.output_offsets, &r.recv_sizes}) {
    t->assign(n, Ints(per_rank));
  }
  for (int dst = 0; dst < n; ++dst) {
    Ints slots(per_rank);
    for (int i = 0; i < per_rank; ++i) slots[i] = i * (max_size + 2);
    std::shuffle(slots.begin(), slots.end(), random);
    for (int src = 0; src < n; ++src) {
      for (int j = 0; j < num_updates; ++j) {
        const int size = std::max(0, static_cast<int>(random() % (max_size + 3)) - 2);
        const int at = dst * num_updates + j;
        r.send_sizes[src][at] = size;
        r.recv_sizes[dst][src * num_updates + j] = size;
        r.input_offsets[src][at] = random() % (r.in_rows - size + 1);
        r.output_offsets[src][at] = slots[src * num_updates + j] + random() % 3;
      }
    }
  }
  return r;
}

TEST(RaggedRandomUpdates) {
  Watchdog watchdog;
  unsigned seed = 0;
  for (int n : {1, 2, 5, 8}) {
    for (int num_updates : {1, 3}) {
      for (int max_size : {1, 6, 40}) {
        ++seed;
        ExpectRagged(RandomRagged(n, num_updates, max_size, seed), seed % 2 ? 4 : 8, seed % 3 == 0);
      }
    }
  }
}

TEST(RaggedInParallel) {
  Watchdog watchdog;
  ExpectRagged(RandomRagged(4, 1, 20000, 77), 4, false);
  ExpectRagged(RandomRagged(3, 2, 15000, 78), 8, true);
}

TEST(RaggedNothingSent) {
  Watchdog watchdog;
  Ragged r = RandomRagged(3, 1, 4, 5);
  for (Table* t : {&r.send_sizes, &r.recv_sizes}) t->assign(3, Ints(3, 0));
  ExpectRagged(r, 4, false);
  r.in_rows = r.out_rows = 0;
  for (Table* t : {&r.input_offsets, &r.output_offsets}) t->assign(3, Ints(3, 0));
  ExpectRagged(r, 4, false);
}

// Ranks 0..2; everyone sends 2 rows to everyone, of 6 rows, packed.
Ragged Regular() {
  Ragged r{3, 1, 6, 6, {}, {}, {}, {}};
  for (int rank = 0; rank < 3; ++rank) {
    r.input_offsets.push_back({0, 2, 4});
    r.send_sizes.push_back({2, 2, 2});
    r.output_offsets.push_back(Ints(3, 2 * rank));
    r.recv_sizes.push_back({2, 2, 2});
  }
  return r;
}

TEST(RaggedErrorsNameThePair) {
  Watchdog watchdog;
  constexpr int32_t kMax = INT32_MAX;
  struct {
    std::function<void(Ragged*)> damage;
    std::vector<const char*> texts;
  } cases[] = {
      {[](Ragged* r) { r->send_sizes[1][2] = -1; },
       {"rank 1 sends to rank 2 a negative size or offset: send_size=-1, recv_size=2",
        "must be >= 0", "Check how the counts are computed on rank 1."}},
      {[](Ragged* r) { r->recv_sizes[2][0] = -7; }, {"rank 0 sends to rank 2", "recv_size=-7"}},
      {[](Ragged* r) { r->input_offsets[2][0] = -3; },
       {"rank 2 sends to rank 0", "input_offset=-3"}},
      {[](Ragged* r) { r->output_offsets[0][1] = -4; },
       {"rank 0 sends to rank 1", "output_offset=-4"}},
      {[](Ragged* r) { r->send_sizes[2][1] = 1; },
       {"rank 2 sends to rank 1 1 rows (send_sizes), but rank 1 expects 2 from it (recv_sizes)",
        "Exchange the counts first"}},
      {[](Ragged* r) { r->input_offsets[1][2] = 5; },
       {"rank 1 sends to rank 2 rows 5 to 5+2, but its operand has 6 rows."}},
      {[](Ragged* r) { r->input_offsets[0][1] = kMax; },
       {"rank 0 sends to rank 1", "its operand has 6 rows."}},
      {[](Ragged* r) { r->send_sizes[0][1] = r->recv_sizes[1][0] = kMax; },
       {"rank 0 sends to rank 1", "its operand has 6 rows."}},
      {[](Ragged* r) { r->output_offsets[0][2] = 5; },
       {"rank 0 sends to rank 2 2 rows at row 5, but the output there has 6 rows."}},
      {[](Ragged* r) { r->output_offsets[1][2] = 1; },
       {"ranks 0 and 1 both write row 1 of rank 2's output", "Make the output_offsets of ranks"}},
  };
  for (const auto& c : cases) {
    Ragged r = Regular();
    c.damage(&r);
    auto memory = MemoryFor(r, 4, false);
    const std::string error = RunRagged(r, &memory);
    EXPECT_CONTAINS(error, "jcoll.ragged_all_to_all over axis 'x' (int32[6,3], direct) called at ");
    for (const char* text : c.texts) EXPECT_CONTAINS(error, text);
    for (const RankMemory& m : memory) {  // Nothing was moved: Buffer's fill is still there.
      EXPECT(m.rows() == Ints(m.rows().size(), 0x5a5a5a5a));
    }
  }
}

// Does not overflow at the limits of int64.
TEST(RaggedHugeNumbers) {
  Watchdog watchdog;
  Ragged r = Regular();
  const int64_t huge[] = {INT64_MAX, INT64_MIN, INT64_MAX - 1};
  for (int input = 2; input <= 5; ++input) {
    for (int64_t value : huge) {
      auto memory = MemoryFor(r, 8, false);
      std::memcpy(memory[1].in[input]->data(), &value, 8);
      EXPECT_CONTAINS(RunRagged(r, &memory, 8),
                      input == 5 ? "rank 0 sends to rank 1" : "rank 1 sends to rank 0");
    }
  }
}

// all_to_all_v: counts[src][dst] rows.
struct Variable {
  int num_ranks, x_rows, y_rows;
  Table counts;
  bool drop;
};

// Rows that src gets through to dst: y holds y_rows, filled in order of src.
Table Kept(const Variable& v) {
  Table kept = v.counts;
  for (int dst = 0; dst < v.num_ranks; ++dst) {
    int room = v.y_rows;
    for (int src = 0; src < v.num_ranks; ++src) {
      kept[src][dst] = std::min(kept[src][dst], room);
      room -= kept[src][dst];
    }
  }
  return kept;
}

std::vector<RankMemory> MemoryFor(const Variable& v, bool back, int index_nbytes) {
  std::vector<RankMemory> memory(v.num_ranks);
  for (int rank = 0; rank < v.num_ranks; ++rank) {
    RankMemory& m = memory[rank];
    m.in.push_back(std::make_unique<Buffer>(Rows(rank, back ? v.y_rows : v.x_rows, 1000000), 2));
    m.AddIndex(v.counts[rank], index_nbytes);
    m.out.push_back(std::make_unique<Buffer>((back ? v.x_rows : v.y_rows) * kWidth * 4, 1));
    if (back) continue;
    for (int i = 0; i < 2; ++i) {
      m.out.push_back(std::make_unique<Buffer>(v.num_ranks * index_nbytes, 3));
    }
  }
  return memory;
}

std::string RunVariable(const Variable& v, bool back, int index_nbytes,
                        std::vector<RankMemory>* memory) {
  Description d = back ? Describe(Motion::kVariableBack, v.num_ranks, v.y_rows, v.x_rows)
                       : Describe(Motion::kVariable, v.num_ranks, v.x_rows, v.y_rows);
  d.drop_overflow = v.drop;
  d.index_nbytes = index_nbytes;
  return Run(d, memory);
}

void ExpectForward(const Variable& v, int index_nbytes) {
  auto memory = MemoryFor(v, false, index_nbytes);
  EXPECT_EQ(RunVariable(v, false, index_nbytes, &memory), "");
  const Table kept = Kept(v);
  for (int dst = 0; dst < v.num_ranks; ++dst) {
    Ints y(v.y_rows * kWidth, 0), received, dropped;
    int y_row = 0;
    for (int src = 0; src < v.num_ranks; ++src) {
      int x_row = 0;
      for (int i = 0; i < dst; ++i) x_row += v.counts[src][i];
      const Ints x = Rows(src, v.x_rows, 1000000);
      for (int i = 0; i < kept[src][dst]; ++i) CopyRow(x, x_row + i, &y, y_row++);
      received.push_back(kept[src][dst]);
      dropped.push_back(v.counts[src][dst] - kept[src][dst]);
    }
    EXPECT(memory[dst].rows() == y);
    EXPECT(memory[dst].index(1, index_nbytes) == received);
    EXPECT(memory[dst].index(2, index_nbytes) == dropped);
  }
}

void ExpectBack(const Variable& v, int index_nbytes) {
  auto memory = MemoryFor(v, true, index_nbytes);
  EXPECT_EQ(RunVariable(v, true, index_nbytes, &memory), "");
  const Table kept = Kept(v);
  for (int src = 0; src < v.num_ranks; ++src) {
    Ints x(v.x_rows * kWidth, 0);
    int x_row = 0;
    for (int dst = 0; dst < v.num_ranks; ++dst) {
      int y_row = 0;
      for (int i = 0; i < src; ++i) y_row += kept[i][dst];
      const Ints y = Rows(dst, v.y_rows, 1000000);
      for (int i = 0; i < kept[src][dst]; ++i) CopyRow(y, y_row + i, &x, x_row + i);
      x_row += v.counts[src][dst];
    }
    EXPECT(memory[src].rows() == x);
  }
}

Variable RandomVariable(int n, int max_count, int y_rows, bool drop, unsigned seed) {
  std::mt19937 random(seed);
  Variable v{n, n * max_count + 3, y_rows, Table(n, Ints(n)), drop};
  for (Ints& counts : v.counts) {
    for (int& count : counts) {
      count = std::max(0, static_cast<int>(random() % (max_count + 3)) - 2);
    }
  }
  return v;
}

TEST(VariableThereAndBack) {
  Watchdog watchdog;
  unsigned seed = 100;
  for (int n : {1, 2, 5, 8}) {
    for (int max_count : {1, 5, 30}) {
      const Variable v = RandomVariable(n, max_count, n * max_count + 2, false, ++seed);
      ExpectForward(v, seed % 2 ? 4 : 8);
      ExpectBack(v, seed % 2 ? 8 : 4);
    }
  }
}

TEST(VariableDropsWhatDoesNotFit) {
  Watchdog watchdog;
  for (int y_rows : {0, 1, 7, 20}) {
    const Variable v = RandomVariable(4, 9, y_rows, true, 200 + y_rows);
    ExpectForward(v, 4);
    ExpectBack(v, 8);
  }
}

TEST(VariableInParallel) {
  Watchdog watchdog;
  const Variable v = RandomVariable(4, 20000, 85000, false, 300);
  ExpectForward(v, 4);
  ExpectBack(v, 4);
}

TEST(VariableErrorsNameThePair) {
  Watchdog watchdog;
  struct {
    std::function<void(Variable*)> damage;
    std::vector<const char*> texts;
  } cases[] = {
      {[](Variable* v) { v->counts[2][1] = -1; },
       {"rank 2 sends to rank 1 send_counts[1]=-1 rows after 2 for lower ranks",
        "its operand has 6 rows", "Check how send_counts is computed on rank 2."}},
      {[](Variable* v) { v->counts[1][2] = 3; },
       {"rank 1 sends to rank 2 send_counts[2]=3 rows after 4 for lower ranks"}},
      {[](Variable* v) { v->counts[0][0] = INT32_MAX; }, {"rank 0 sends to rank 0"}},
      {[](Variable* v) { v->y_rows = 5; },
       {"rank 0 is sent 6 rows (2, 2, 2 by rank), but output_size=5; the rows of rank 2 for rank 0",
        "Raise output_size to at least 6, or pass overflow=\"drop\""}},
      {[](Variable* v) { v->y_rows = 0; }, {"the rows of rank 0 for rank 0 are the first"}},
  };
  for (bool back : {false, true}) {
    for (const auto& c : cases) {
      Variable v{3, 6, 6, Table(3, {2, 2, 2}), false};
      c.damage(&v);
      auto memory = MemoryFor(v, back, 4);
      const std::string error = RunVariable(v, back, 4, &memory);
      EXPECT_CONTAINS(error, "jcoll.all_to_all_v over axis 'x'");
      for (const char* text : c.texts) EXPECT_CONTAINS(error, text);
      for (const RankMemory& m : memory) {
        EXPECT(m.rows() == Ints(m.rows().size(), 0x5a5a5a5a));
      }
    }
  }
}

TEST(VariableHugeNumbers) {
  Watchdog watchdog;
  const Variable v{3, 6, 6, Table(3, {2, 2, 2}), true};
  for (int64_t value : {INT64_MAX, INT64_MIN, INT64_MAX - 5}) {
    auto memory = MemoryFor(v, false, 8);
    std::memcpy(static_cast<char*>(memory[1].in[1]->data()) + 8, &value, 8);
    EXPECT_CONTAINS(RunVariable(v, false, 8, &memory), "rank 1 sends to rank 1");
  }
}

}  // namespace
