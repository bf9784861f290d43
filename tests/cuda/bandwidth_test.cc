// Every kernel at sizes that matter, by 2, 4 and 8 ranks: are all elements right, and how fast is
// it? scripts/gpu_check.py reads the lines that this prints; in the emulator they say nothing of
// speed.
#include <algorithm>
#include <chrono>

#include "tests/cuda/plans.h"

namespace {

using namespace plans;

constexpr int kRepeats = world::kIsEmulated ? 1 : 20;
// Of the larger one of a rank's two buffers. Not a power of two: the last parts are shorter.
constexpr int64_t kEmulatedNbytes[] = {8 * 630};
constexpr int64_t kRealNbytes[] = {8 * 630, 64 << 10, 1 << 20, 8 << 20, (64 << 20) + 8 * 52};

struct Span {
  const int64_t* first;
  const int64_t* last;
  const int64_t* begin() const { return first; }
  const int64_t* end() const { return last; }
};
Span Sizes() {
  if (world::kIsEmulated) return {std::begin(kEmulatedNbytes), std::end(kEmulatedNbytes)};
  return {std::begin(kRealNbytes), std::end(kRealNbytes)};
}

// Element i of rank r's input; sums of them are exact in any order.
float Value(int64_t r, int64_t i) { return static_cast<float>((5 * i + 3 * r) % 16); }
float Sum(int n, int64_t i) {
  float sum = 0;
  for (int r = 0; r < n; ++r) sum += Value(r, i);
  return sum;
}

// One kernel's call. Counts and bytes are of all that the memory of a GPU of its own would see.
struct Subject {
  const char* name;
  Kernel kernel;
  bool reduces;
  bool is_per_rank;  // Call::count is that of one rank's block of the larger buffer.
  // Bytes that all ranks together read and write, for larger buffers of m bytes.
  double (*traffic)(double n, double m);
  float (*expected)(int n, int64_t count, int rank, int64_t i);  // Element i of rank's output.
  int64_t (*output_count)(int n, int64_t count);
};

int64_t Whole(int, int64_t count) { return count; }
int64_t PerRank(int n, int64_t count) { return n * count; }
float Reduced(int n, int64_t, int, int64_t i) { return Sum(n, i); }
float Scattered(int n, int64_t count, int rank, int64_t i) { return Sum(n, rank * count + i); }
float Gathered(int, int64_t count, int, int64_t i) { return Value(i / count, i % count); }
float Exchanged(int, int64_t count, int rank, int64_t i) {
  return Value(i / count, rank * count + i % count);
}
float FromRoot(int n, int64_t, int, int64_t i) { return Value(n - 1, i); }
double OneShot(double n, double m) { return n * (n + 1) * m; }
double Lines(double n, double m) { return n * (4 * (n - 1) + 2) * m; }
double OnceInOnceOut(double n, double m) { return 2 * n * m; }
double AllByOne(double n, double m) { return (n + 1) * m; }

// What plans move depends on the plan: of theirs only the inputs and outputs are counted.
const Subject kSubjects[] = {
    {"all_reduce_one_shot", Kernel::kAllReduceOneShot, true, false, OneShot, Reduced, Whole},
    {"all_reduce_one_shot_ll", Kernel::kAllReduceOneShotLL, true, false, Lines, Reduced, Whole},
    {"all_reduce_two_shot", Kernel::kAllReduceTwoShot, true, false, OnceInOnceOut, Reduced, Whole},
    {"reduce_scatter", Kernel::kReduceScatter, true, true, AllByOne, Scattered, Whole},
    {"all_gather", Kernel::kAllGather, false, true, AllByOne, Gathered, PerRank},
    {"all_to_all", Kernel::kAllToAll, false, true, OnceInOnceOut, Exchanged, PerRank},
    {"ragged_all_to_all", Kernel::kRaggedAllToAll, false, true, OnceInOnceOut, Exchanged, PerRank},
    {"broadcast", Kernel::kBroadcast, false, false, AllByOne, FromRoot, Whole},
    {"ring by plan_simple", Kernel::kPlanSimple, true, false, OnceInOnceOut, Reduced, Whole},
    {"ring by plan_ll", Kernel::kPlanLL, true, false, OnceInOnceOut, Reduced, Whole},
};

using Rows = std::vector<int64_t, world::Allocator<int64_t>>;

// Equal numbers of rows, of one float each.
struct EqualRows {
  Rows from, size, to;
  EqualRows(int n, int64_t count, int rank) {
    for (int p = 0; p < n; ++p) {
      from.push_back(p * count);
      size.push_back(count);
      to.push_back(rank * count);
    }
  }
};

class Measurement {
 public:
  Measurement(World* world, const Subject& subject, int64_t nbytes)
      : world_(*world), subject_(subject) {
    const int n = world->num_ranks();
    call_.kernel = subject.kernel;
    call_.reduce_op = subject.reduces ? ReduceOp::kSum : ReduceOp::kNone;
    call_.count = nbytes / 4 / (subject.is_per_rank ? n : 1);
    call_.root = n - 1;
    call_.peers.num_ranks = n;
    if (jcoll::gpu::IsPlan(subject.kernel)) {
      call_.program = &Find("ring", PlanOp::kAllReduce, n).program;
    }
    if (subject.kernel == Kernel::kRaggedAllToAll) {
      call_.rows.is_int64 = true;
      call_.rows.row_nbytes = 4;
      call_.rows.input_rows = call_.rows.output_rows = n * call_.count;
    }
    // All blocks of all ranks must be resident at once.
    const int fit = std::max(1, world->device().num_sms / n);
    call_.num_blocks =
        world::kIsEmulated ? 2 : std::min(fit, jcoll::gpu::BlocksFor(call_, world->device()));
    if (subject.kernel == Kernel::kAllReduceOneShotLL) {
      call_.num_blocks = jcoll::gpu::BlocksFor(call_, world->device());
    }
  }

  // Whether the kernel does so much in so few blocks.
  bool IsServed() const {
    const bool fits =
        call_.num_blocks * world_.num_ranks() <= world_.device().num_sms || world::kIsEmulated;
    return fits && !Refusal(call_, world_.device());
  }

  // Seconds of one call on all ranks, one after the other.
  double Run(const Buffers& input, const Buffers& output) {
    std::vector<EqualRows> rows;
    std::vector<Call> calls;
    for (int r = 0; r < world_.num_ranks(); ++r) {
      rows.emplace_back(world_.num_ranks(), call_.count, r);
      calls.push_back(world_.ForRank(call_, r, &input, &output));
    }
    for (int r = 0; r < world_.num_ranks(); ++r) {
      calls[r].rows.input_offsets = rows[r].from.data();
      calls[r].rows.send_sizes = rows[r].size.data();
      calls[r].rows.output_offsets = rows[r].to.data();
    }
    Launch(calls, 1);  // Memory moves to where it is used.
    const auto start = std::chrono::steady_clock::now();
    Launch(calls, kRepeats);
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    return elapsed.count() / kRepeats;
  }

  bool IsRight(const Buffers& output) {
    const int n = world_.num_ranks();
    world_.ExpectNoErrors();
    for (int r = 0; r < n; ++r) {
      const bool ok = elements::ExpectElements<float>(
          output[r], subject_.output_count(n, call_.count),
          [&](int64_t i) { return subject_.expected(n, call_.count, r, i); });
      if (!ok) return false;
    }
    return true;
  }

 private:
  void Launch(const std::vector<Call>& calls, int repeats) {
    for (int k = 0; k < repeats; ++k) {
      for (const Call& call : calls) world_.Launch(call);
    }
    world_.Synchronize();
  }

  World& world_;
  const Subject& subject_;
  Call call_;
};

// Bytes read and written per second.
double CopyBandwidth() {
  const int64_t nbytes = world::kIsEmulated ? 1 << 20 : 256 << 20;
  const world::Buffer from(0, nbytes), to(0, nbytes);
  double best = 1e9;
  for (int k = 0; k < 5; ++k) {
    best = std::min(best, world::CopySeconds(to.data(), from.data(), nbytes));
  }
  return 2.0 * static_cast<double>(nbytes) / best;
}

void MeasureRanks(int n) {
  const double copy = CopyBandwidth();
  std::printf("copy\t%.4g\n", copy);
  World world(n);
  int num_measured = 0;
  for (int64_t nbytes : Sizes()) {
    Buffers input(n, nbytes), output(n, nbytes);
    for (int r = 0; r < n; ++r) {
      auto* values = reinterpret_cast<float*>(input[r]);
      for (int64_t i = 0; i < nbytes / 4; ++i) values[i] = Value(r, i);
    }
    for (const Subject& subject : kSubjects) {
      Measurement measurement(&world, subject, nbytes);
      if (!measurement.IsServed()) continue;
      output.Fill(0x5a);
      const double seconds = measurement.Run(input, output);
      const double rate = subject.traffic(n, static_cast<double>(nbytes)) / seconds;
      const bool ok = measurement.IsRight(output);
      std::printf("kernel\t%s\t%d\t%lld\t%.4g\t%.4g\t%.3f\t%s\n", subject.name, n,
                  static_cast<long long>(nbytes), seconds, rate, rate / copy, ok ? "ok" : "WRONG");
      EXPECT(ok);
      ++num_measured;
    }
  }
  EXPECT(num_measured >= static_cast<int>(std::size(kSubjects)));
}

TEST(TwoRanks) { MeasureRanks(2); }
TEST(FourRanks) { MeasureRanks(4); }
TEST(EightRanks) { MeasureRanks(8); }

}  // namespace
