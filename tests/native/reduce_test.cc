// Reduce against the plain scalar reference of reduce_reference.h.

#include "csrc/reduce.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <thread>
#include <vector>

#include "check.h"
#include "csrc/float16.h"
#include "reduce_reference.h"

namespace jcoll {
namespace {

constexpr int kMaxSrcs = 9;
constexpr int64_t kCounts[] = {0, 1, 3, 7, 8, 15, 16, 17, 63, 1000, 4097};
#if defined(__SANITIZE_THREAD__)
constexpr int64_t kMaxCount =
    63;  // one thread does all this: nothing to find, at 50 times the cost
#else
constexpr int64_t kMaxCount = 4097;
#endif
constexpr int kMaxOffset = 3;  // bytes by which buffers are misaligned
constexpr int kGuard = 64;     // bytes around a buffer that must not change

std::vector<std::string> Isas() {
  const std::string best = IsaName();
  std::vector<std::string> isas;
  for (const char* name : {"baseline", "avx2", "avx512"}) {
    if (SetIsa(name)) isas.push_back(name);
  }
  SetIsa(best);
  return isas;
}

template <typename Body>
void ForEachIsa(Body body) {
  const std::string best = IsaName();
  for (const std::string& isa : Isas()) {
    SetIsa(isa);
    body();
  }
  SetIsa(best);
}

// ---- Inputs and comparison.

// One part in four from the awkward corners of the type, the others random: integers and bits over
// the whole range, floating values near 1, so that sums round and products stay finite.
class Inputs {
 public:
  template <typename S>
  std::vector<std::vector<S>> Make() {
    std::vector<std::vector<S>> srcs(kMaxSrcs, std::vector<S>(kMaxCount));
    for (std::vector<S>& src : srcs) {
      for (S& x : src) Fill(&x);
    }
    return srcs;
  }

 private:
  template <typename T>
  void Fill(T* x) {
    if constexpr (std::is_floating_point_v<T>) {
      *x = Real<T>();
    } else {
      *x = static_cast<T>(random_());
    }
  }
  void Fill(Bool* x) { x->bits = random_() % 2 == 0 ? 0 : static_cast<uint8_t>(random_()); }
  void Fill(Float16* x) { Encode16(x, 0x3ff); }
  void Fill(BFloat16* x) { Encode16(x, 0x7f); }
  void Fill(Complex64* x) { *x = {Real<float>(), Real<float>()}; }
  void Fill(Complex128* x) { *x = {Real<double>(), Real<double>()}; }

  template <typename S>
  void Encode16(S* x, int mantissa) {
    const int infinity = 0x7fff & ~mantissa, sign = static_cast<int>(random_() & 0x8000);
    const int corners[] = {0,     1, mantissa, mantissa + 1, infinity - 1, infinity, infinity + 1,
                           0x7fff};
    if (random_() % 4 == 0) {
      x->bits = static_cast<uint16_t>(sign | corners[random_() % 8]);
    } else {
      Encode(Real<float>(), x);
    }
  }

  template <typename T>
  T Real() {
    using Limits = std::numeric_limits<T>;
    const T corners[] = {0,
                         Limits::denorm_min(),
                         Limits::min(),
                         1,
                         Limits::max(),
                         Limits::infinity(),
                         Limits::quiet_NaN(),
                         Limits::min() / 3};
    const T sign = random_() % 2 == 0 ? T{1} : T{-1};
    if (random_() % 4 == 0) return sign * corners[random_() % 8];
    return sign * std::uniform_real_distribution<T>(T{0.5}, T{2})(random_);
  }

  std::mt19937_64 random_{20240607};
};

// Bit for bit; but which of several NaNs a sum returns is open.
template <typename S>
bool Same(S a, S b) {
  return std::memcmp(&a, &b, sizeof(S)) == 0 || (IsNan(a) && IsNan(b));
}
bool Same(Complex64 a, Complex64 b) { return Same(a.re, b.re) && Same(a.im, b.im); }
bool Same(Complex128 a, Complex128 b) { return Same(a.re, b.re) && Same(a.im, b.im); }

// A misaligned buffer between guard bytes.
class Buffer {
 public:
  Buffer(int64_t nbytes, int offset)
      : nbytes_(nbytes), before_(kGuard + offset), bytes_(nbytes + before_ + kGuard, 0x5b) {}
  unsigned char* data() { return bytes_.data() + before_; }
  bool GuardsIntact() const {
    const auto intact = [](unsigned char c) { return c == 0x5b; };
    return std::all_of(bytes_.begin(), bytes_.begin() + before_, intact) &&
           std::all_of(bytes_.begin() + before_ + nbytes_, bytes_.end(), intact);
  }

 private:
  int64_t nbytes_, before_;
  std::vector<unsigned char> bytes_;
};

struct Call {
  DType dtype;
  ReduceOp op;
  int num_srcs;
  int64_t count;
  int offset;  // misalignment of source k is offset * (k + 1) % 4
  bool stream;
  bool in_place;  // destination k is source k, otherwise one destination and one spare
};

template <typename S>
void CheckCall(const Call& call, const std::vector<std::vector<S>>& inputs,
               const std::vector<S>& expected) {
  const int64_t nbytes = call.count * static_cast<int64_t>(sizeof(S));
  std::vector<Buffer> srcs, dsts;
  std::vector<const void*> src_pointers;
  std::vector<void*> dst_pointers;
  for (int k = 0; k < call.num_srcs; ++k) srcs.emplace_back(nbytes, call.offset * (k + 1) % 4);
  for (int k = 0; k < 2; ++k) dsts.emplace_back(nbytes, call.offset);
  for (int k = 0; k < call.num_srcs; ++k) {
    if (nbytes > 0) std::memcpy(srcs[k].data(), inputs[k].data(), nbytes);
    src_pointers.push_back(srcs[k].data());
  }
  for (Buffer& dst : call.in_place ? srcs : dsts) dst_pointers.push_back(dst.data());
  Reduce(call.dtype, call.op, src_pointers.data(), call.num_srcs, dst_pointers.data(),
         static_cast<int>(dst_pointers.size()), call.count, call.stream);
  int64_t wrong = 0;
  for (int64_t i = 0; i < call.count; ++i) {
    S got;
    std::memcpy(&got, static_cast<char*>(dst_pointers[0]) + i * sizeof(S), sizeof(S));
    wrong += !Same(got, expected[i]);
  }
  for (void* dst : dst_pointers) {
    wrong += nbytes > 0 && std::memcmp(dst, dst_pointers[0], nbytes) != 0;
  }
  for (const std::vector<Buffer>* buffers : {&srcs, &dsts}) {
    for (const Buffer& buffer : *buffers) wrong += !buffer.GuardsIntact();
  }
  check::Report(
      wrong == 0, __FILE__, __LINE__,
      std::string("0 wrong elements, got ") + std::to_string(wrong) + ": " + IsaName() + " " +
          Name(call.dtype) + " " + Name(call.op) + " num_srcs=" + std::to_string(call.num_srcs) +
          " count=" + std::to_string(call.count) + " offset=" + std::to_string(call.offset) +
          " stream=" + std::to_string(call.stream) + " in_place=" + std::to_string(call.in_place));
}

template <DType kDType>
void CheckDType() {
  using S = typename DTypeTraits<kDType>::Storage;
  const std::vector<std::vector<S>> inputs = Inputs().Make<S>();
  for (int o = 0; o < kNumReduceOps; ++o) {
    const ReduceOp op = static_cast<ReduceOp>(o);
    if (!Promised(kDType, op)) continue;
    for (int num_srcs = 1; num_srcs <= kMaxSrcs; ++num_srcs) {
      std::vector<S> expected(kMaxCount);
      for (int64_t i = 0; i < kMaxCount; ++i) expected[i] = Reference(op, inputs, num_srcs, i);
      ForEachIsa([&] {
        for (int64_t count : kCounts) {
          if (count > kMaxCount) continue;
          for (int offset : {0, 1, kMaxOffset}) {
            for (int way = 0; way < 4; ++way) {
              CheckCall({kDType, op, num_srcs, count, offset, way % 2 == 1, way / 2 == 1}, inputs,
                        expected);
            }
          }
        }
      });
    }
  }
}

// One float through Reduce.
float Reduced(ReduceOp op, const std::vector<float>& values) {
  std::vector<const void*> srcs;
  for (const float& value : values) srcs.push_back(&value);
  float result;
  void* dst = &result;
  Reduce(DType::kF32, op, srcs.data(), static_cast<int>(srcs.size()), &dst, 1, 1, false);
  return result;
}

}  // namespace

#define JCOLL_DTYPE(enumerator, name, Storage, Accum) \
  TEST(Reduce_##enumerator) { CheckDType<DType::enumerator>(); }
#include "csrc/dtypes.def"
#undef JCOLL_DTYPE

TEST(SupportsWhatIsPromised) {
  for (int d = 0; d < kNumDTypes; ++d) {
    for (int o = 0; o < kNumReduceOps; ++o) {
      const DType dtype = static_cast<DType>(d);
      const ReduceOp op = static_cast<ReduceOp>(o);
      ForEachIsa([&] {
        EXPECT_EQ(Supports(dtype, op), Promised(dtype, op));
        EXPECT_EQ(GetReduceFn(dtype, op) != nullptr, Promised(dtype, op));
      });
    }
  }
}

TEST(NamesAreParsedBack) {
  for (int d = 0; d < kNumDTypes; ++d) {
    const DType dtype = static_cast<DType>(d);
    DType parsed = static_cast<DType>((d + 1) % kNumDTypes);
    EXPECT(ParseDType(Name(dtype), &parsed));
    EXPECT_EQ(parsed, dtype);
  }
  for (int o = 0; o < kNumReduceOps; ++o) {
    const ReduceOp op = static_cast<ReduceOp>(o);
    ReduceOp parsed = static_cast<ReduceOp>((o + 1) % kNumReduceOps);
    EXPECT(ParseReduceOp(Name(op), &parsed));
    EXPECT_EQ(parsed, op);
  }
  DType dtype = DType::kS16;
  ReduceOp op = ReduceOp::kMin;
  for (const char* name : {"", "float", "float8", "Float32", "float32 "})
    EXPECT(!ParseDType(name, &dtype));
  for (const char* name : {"", "avg", "SUM", "sum "}) EXPECT(!ParseReduceOp(name, &op));
  EXPECT_EQ(dtype, DType::kS16);
  EXPECT_EQ(op, ReduceOp::kMin);
  EXPECT_EQ(std::string(Name(DType::kBF16)), "bfloat16");
  EXPECT_EQ(Size(DType::kBool), 1);
  EXPECT_EQ(Size(DType::kC128), 16);
}

TEST(IsaIsChosenByName) {
  const std::string best = IsaName();
  EXPECT_EQ(best, Isas().back());
  EXPECT(!SetIsa("sse9"));
  EXPECT(!SetIsa(""));
  EXPECT_EQ(IsaName(), best);
  EXPECT(SetIsa("baseline"));
  EXPECT_EQ(std::string(IsaName()), "baseline");
  EXPECT(SetIsa(best));
}

// 2^24 + 1 rounds to 2^24 in float: every other order or grouping of these gives another sum.
TEST(SourceOrderIsKept) {
  ForEachIsa([] {
    EXPECT_EQ(Reduced(ReduceOp::kSum, {0x1p24f, 1, 1, 1, 1, 1}), 0x1p24f);
    EXPECT_EQ(Reduced(ReduceOp::kSum, {1, 1, 1, 1, 1, 0x1p24f}), 0x1p24f + 4);
    EXPECT_EQ(Reduced(ReduceOp::kSum, {0x1p24f, 1, -0x1p24f, 1, 1, 1}), 3.0f);
  });
}

TEST(SignedZeroAndNanInExtrema) {
  const float nan = std::nanf(""), inf = std::numeric_limits<float>::infinity();
  ForEachIsa([&] {
    EXPECT(!std::signbit(Reduced(ReduceOp::kMax, {-0.0f, 0.0f})));
    EXPECT(!std::signbit(Reduced(ReduceOp::kMax, {0.0f, -0.0f})));
    EXPECT(std::signbit(Reduced(ReduceOp::kMin, {-0.0f, 0.0f})));
    EXPECT(std::signbit(Reduced(ReduceOp::kMin, {0.0f, -0.0f})));
    for (const float each : {nan, -nan}) {
      EXPECT(std::isnan(Reduced(ReduceOp::kMax, {each, inf, 1})));
      EXPECT(std::isnan(Reduced(ReduceOp::kMax, {inf, 1, each})));
      EXPECT(std::isnan(Reduced(ReduceOp::kMin, {each, -inf, 1})));
      EXPECT(std::isnan(Reduced(ReduceOp::kMin, {-inf, 1, each})));
    }
  });
}

// What is summed follows the mode of the thread, what is compared does not; and the mode comes
// back.
TEST(DenormalsFollowTheScope) {
  const float tiny = std::numeric_limits<float>::min() / 4;
  ForEachIsa([&] {
    EXPECT_EQ(Reduced(ReduceOp::kSum, {tiny, tiny}), 2 * tiny);
    uint32_t sum, larger, smaller;
    {
      const ScopedFlushDenormals flush;
      sum = FloatBits(Reduced(ReduceOp::kSum, {tiny, tiny}));
      larger = FloatBits(Reduced(ReduceOp::kMax, {0, tiny}));
      smaller = FloatBits(Reduced(ReduceOp::kMin, {0, -tiny}));
    }
#if defined(__x86_64__) || defined(__aarch64__)
    EXPECT_EQ(sum, 0u);
#endif
    EXPECT_EQ(larger, FloatBits(tiny));
    EXPECT_EQ(smaller, FloatBits(-tiny));
    EXPECT_EQ(Reduced(ReduceOp::kSum, {tiny, tiny}), 2 * tiny);
  });
}

// As a runtime cuts a collective: odd boundaries, all threads at once, in place.
TEST(ThreadsOnDisjointRanges) {
  constexpr int kThreads = 4, kRanks = 3;
  constexpr int64_t kCount = 40009;
  std::vector<std::vector<float>> buffers(kRanks, std::vector<float>(kCount));
  for (int r = 0; r < kRanks; ++r) {
    for (int64_t i = 0; i < kCount; ++i) buffers[r][i] = static_cast<float>(r * kCount + i);
  }
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&buffers, t] {
      const int64_t begin = kCount * t / kThreads, end = kCount * (t + 1) / kThreads;
      void* pointers[kRanks];
      for (int r = 0; r < kRanks; ++r) pointers[r] = &buffers[r][begin];
      Reduce(DType::kF32, ReduceOp::kSum, pointers, kRanks, pointers, kRanks, end - begin,
             t % 2 == 1);
    });
  }
  for (std::thread& thread : threads) thread.join();
  int64_t wrong = 0;
  for (const std::vector<float>& buffer : buffers) {
    for (int64_t i = 0; i < kCount; ++i)
      wrong += buffer[i] != static_cast<float>(3 * kCount + 3 * i);
  }
  EXPECT_EQ(wrong, 0);
}

}  // namespace jcoll
