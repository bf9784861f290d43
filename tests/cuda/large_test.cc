// Bytes and elements beyond number 2^32, in buffers of 10 GiB, half for each of two ranks. There is
// memory only where they are touched, near the multiples of 512 MiB: of the many threads that a
// block believes to have only four run, which come by there.
#include <sys/mman.h>

#include "cuda/kernels/plan_lanes.cuh"
#include "tests/cuda/world.h"

namespace {

using namespace world;

constexpr int kRanks = 2;
constexpr int64_t kNbytes = int64_t{10} << 30;
constexpr int64_t kHalf = kNbytes / kRanks;  // What is one rank's.
constexpr uint32_t kThreads = 1 << 25;
constexpr int64_t kTurn = int64_t{kThreads} * 16;  // All threads, a vector each.
static_assert(kHalf % kTurn == 0);

// Zeros, of which nothing is there before it is touched.
class Sparse {
 public:
  explicit Sparse(int64_t nbytes, int misalignment = 0)
      : size_(static_cast<size_t>(nbytes + misalignment)), misalignment_(misalignment) {
    constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    memory_ = mmap(nullptr, size_, PROT_READ | PROT_WRITE, kFlags, -1, 0);
    EXPECT(memory_ != MAP_FAILED);
  }
  ~Sparse() { munmap(memory_, size_); }
  Sparse(const Sparse&) = delete;
  Sparse& operator=(const Sparse&) = delete;
  char* data() const { return static_cast<char*>(memory_) + misalignment_; }

 private:
  const size_t size_;
  const int misalignment_;
  void* memory_;
};

// Not the same for indices that differ by 2^31 or 2^32.
template <typename T>
T Value(int rank, int64_t i) {
  const uint64_t seed = static_cast<uint64_t>(i) * 2 + static_cast<uint64_t>(rank) + 1;
  return static_cast<T>((seed * 0x9e3779b97f4a7c15) >> 33);
}

// Calls f(i) for the elements that the four threads turn to, out of [0, count): so many on both
// sides of each multiple of kTurn.
template <typename F>
void AtMarks(int64_t count, int64_t element_nbytes, int reach, F f) {
  const int64_t turn = kTurn / element_nbytes;
  for (int64_t mark = 0; mark <= count; mark += turn) {
    for (int64_t i = mark - reach; i < mark + reach; ++i) {
      if (i >= 0 && i < count) f(i);
    }
  }
}

struct Case {
  Kernel kernel;
  int64_t input_nbytes = kNbytes, output_nbytes = kNbytes;
  int misalignment = 0;  // Of the input: then elements go one by one.
  jcoll::gpu::RaggedRows rows[kRanks] = {};
};

class Run {
 public:
  explicit Run(const Case& c) : case_(c) {
    jcoll::emulator::Options options;
    options.threads_believed = kThreads;
    jcoll::emulator::SetOptions(options);
    for (int r = 0; r < kRanks; ++r) {
      inputs_.push_back(std::make_unique<Sparse>(c.input_nbytes, c.misalignment));
      outputs_.push_back(std::make_unique<Sparse>(c.output_nbytes));
    }
  }
  ~Run() { jcoll::emulator::SetOptions({}); }

  template <typename T>
  void Launch(DType dtype) {
    reach_ = case_.misalignment == 0 ? int{32 / sizeof(T)} : 2;
    for (int r = 0; r < kRanks; ++r) {
      AtMarks(case_.input_nbytes / int{sizeof(T)}, sizeof(T), reach_,
              [&](int64_t i) { Store(inputs_[r]->data(), i, Value<T>(r, i)); });
    }
    Call call;
    call.kernel = case_.kernel;
    call.dtype = dtype;
    call.reduce_op = ReduceOp::kSum;
    call.count = std::min(case_.input_nbytes, case_.output_nbytes) / int{sizeof(T)};
    if (case_.kernel == Kernel::kAllToAll) call.count /= kRanks;
    call.root = 1;
    call.num_blocks = 1;
    const auto multicast_input = MakeMulticast(inputs_, case_.input_nbytes);
    const auto multicast_output = MakeMulticast(outputs_, case_.output_nbytes);
    for (int r = 0; r < kRanks; ++r) {
      Call own = world_.ForRank(call, r, nullptr, nullptr);
      own.rows = case_.rows[r];
      own.peers.multicast_input = multicast_input->address();
      own.peers.multicast_output = multicast_output->address();
      for (int p = 0; p < kRanks; ++p) {
        own.peers.input[p] = inputs_[p]->data();
        own.peers.output[p] = outputs_[p]->data();
      }
      world_.Launch(own);
    }
    world_.Synchronize();
  }

  // Element i of rank r's output is expected(r, i).
  template <typename T, typename F>
  void Expect(F expected) {
    int64_t checked = 0, wrong = 0;
    for (int r = 0; r < kRanks; ++r) {
      AtMarks(case_.output_nbytes / int{sizeof(T)}, sizeof(T), reach_, [&](int64_t i) {
        T found;
        std::memcpy(&found, outputs_[r]->data() + i * int{sizeof(T)}, sizeof(T));
        if (found != expected(r, i) && wrong++ == 0) EXPECT_EQ(std::to_string(i), "right");
        ++checked;
      });
    }
    EXPECT(checked > 0);
  }

  World& world() { return world_; }

 private:
  using Buffers = std::vector<std::unique_ptr<Sparse>>;

  template <typename T>
  static void Store(char* to, int64_t i, T value) {
    std::memcpy(to + i * int{sizeof(T)}, &value, sizeof(T));
  }
  static std::unique_ptr<Multicast> MakeMulticast(const Buffers& buffers, int64_t nbytes) {
    return std::make_unique<Multicast>(std::vector<void*>{buffers[0]->data(), buffers[1]->data()},
                                       nbytes);
  }

  const Case case_;
  World world_{kRanks};
  Buffers inputs_, outputs_;
  int reach_ = 0;
};

// `expected` of the type's values.
template <typename T, typename F>
void Check(const Case& c, DType dtype, F expected) {
  Run run(c);
  run.Launch<T>(dtype);
  run.world().ExpectNoErrors();
  run.Expect<T>(expected);
}

template <typename T>
T Sum(int64_t i) {
  return static_cast<T>(Value<T>(0, i) + Value<T>(1, i));
}

TEST(AllGather) {
  for (int misalignment : {0, 1}) {
    Check<uint8_t>({Kernel::kAllGather, kHalf, kNbytes, misalignment}, DType::kU8,
                   [](int, int64_t i) { return Value<uint8_t>(i >= kHalf, i % kHalf); });
  }
}

TEST(AllToAll) {
  Check<uint8_t>({Kernel::kAllToAll}, DType::kU8, [](int rank, int64_t i) {
    return Value<uint8_t>(i >= kHalf, rank * kHalf + i % kHalf);
  });
}

TEST(Broadcast) {
  for (int misalignment : {0, 1}) {
    Check<uint8_t>({Kernel::kBroadcast, kNbytes, kNbytes, misalignment}, DType::kU8,
                   [](int, int64_t i) { return Value<uint8_t>(1, i); });
  }
}

TEST(ReduceScatter) {
  Check<uint8_t>({Kernel::kReduceScatter, kNbytes, kHalf}, DType::kU8,
                 [](int rank, int64_t i) { return Sum<uint8_t>(rank * kHalf + i); });
}

TEST(AllReduce) {
  for (Kernel kernel : {Kernel::kAllReduceOneShot, Kernel::kAllReduceTwoShot}) {
    for (int misalignment : {0, 1}) {
      Check<uint8_t>({kernel, kNbytes, kNbytes, misalignment}, DType::kU8,
                     [](int, int64_t i) { return Sum<uint8_t>(i); });
    }
  }
}

TEST(AllReduceMultimem) {
  for (Kernel kernel : {Kernel::kAllReduceMultimemOneShot, Kernel::kAllReduceMultimemTwoShot}) {
    Check<uint32_t>({kernel}, DType::kU32, [](int, int64_t i) { return Sum<uint32_t>(i); });
  }
}

// As all_to_all, by rows. `is_int64`: of one byte, and so with numbers beyond 2^32.
struct EvenRows {
  int64_t from[kRanks], size[kRanks], to[kRanks];
  int32_t narrow_from[kRanks], narrow_size[kRanks], narrow_to[kRanks];

  jcoll::gpu::RaggedRows Of(int rank, bool is_int64) {
    const int64_t row_nbytes = is_int64 ? 1 : 1 << 16, half = kHalf / row_nbytes;
    for (int p = 0; p < kRanks; ++p) {
      from[p] = p * half, size[p] = half, to[p] = rank * half;
      if (is_int64) continue;
      narrow_from[p] = static_cast<int32_t>(from[p]);
      narrow_size[p] = static_cast<int32_t>(size[p]);
      narrow_to[p] = static_cast<int32_t>(to[p]);
    }
    if (is_int64) return {from, size, to, true, 1, row_nbytes, 2 * half, 2 * half};
    return {narrow_from, narrow_size, narrow_to, false, 1, row_nbytes, 2 * half, 2 * half};
  }
};

TEST(RaggedAllToAll) {
  for (bool is_int64 : {false, true}) {
    EvenRows rows[kRanks];
    Case c{Kernel::kRaggedAllToAll};
    for (int r = 0; r < kRanks; ++r) c.rows[r] = rows[r].Of(r, is_int64);
    Check<uint8_t>(c, DType::kU8, [](int rank, int64_t i) {
      return Value<uint8_t>(i >= kHalf, rank * kHalf + i % kHalf);
    });
  }
}

// One row too many, at the end: nothing is sent by its rank, and all outputs are poisoned.
TEST(PoisonOfRowsOutside) {
  EvenRows rows[kRanks];
  Case c{Kernel::kRaggedAllToAll, kNbytes, kNbytes, 1};
  for (int r = 0; r < kRanks; ++r) c.rows[r] = rows[r].Of(r, true);
  rows[0].size[1] += 1;
  Run run(c);
  run.Launch<uint8_t>(DType::kU8);
  EXPECT_EQ(run.world().error(0).kind, jcoll::gpu::ErrorKind::kRowsOutside);
  EXPECT_EQ(run.world().error(0).seen, UINT32_MAX);  // kNbytes + 1, as far as it goes.
  EXPECT_EQ(run.world().error(1).kind, jcoll::gpu::ErrorKind::kPeerGaveUp);
  run.Expect<uint8_t>([](int, int64_t) { return 0xff; });
}

// The lanes of a plan's chunks, of which there are too many to run, lie one behind the other.
TEST(LanesOfPlans) {
  constexpr int kBlocks = 64, kParts = 2;
  jcoll::gpu::Args args;
  jcoll::gpu::PlanLanes& lanes = args.plan_lanes;
  lanes.block_nbytes = kNbytes + 40;
  lanes.chunk_nbytes = kHalf + 128;
  lanes.lane_nbytes = 256 << 10;
  lanes.num_turns = static_cast<int32_t>(lanes.chunk_nbytes / lanes.lane_nbytes / kBlocks + 1);
  gridDim.x = kBlocks;
  int64_t end = 0;
  for (int part = 0; part < kParts; ++part) {
    for (int turn = 0; turn < lanes.num_turns; ++turn) {
      for (blockIdx.x = 0; blockIdx.x < kBlocks; ++blockIdx.x) {
        const auto range = jcoll::gpu::PlanTurn(args, turn).RangeOf(part);
        if (range.nbytes == 0) continue;
        EXPECT_EQ(range.begin, end);
        end += range.nbytes;
      }
    }
  }
  EXPECT_EQ(end, lanes.block_nbytes);
  char* const buffer = reinterpret_cast<char*>(4096);
  blockIdx.x = 0;
  EXPECT_EQ(jcoll::gpu::PlanTurn(args, 0).InBlock(buffer, 3, {kHalf, 1}) - buffer,
            3 * lanes.block_nbytes + kHalf);
}

}  // namespace
