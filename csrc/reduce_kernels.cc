// The loops of Reduce, for one instruction set (see reduce_kernels.h for what that forbids here).
//
// A range is cut into tiles. Of each tile, the sources are folded into an accumulator that stays in
// the L1 cache, kFan of them in a pass; it is rounded to the storage type, and copied to every
// destination. All sources of a tile are read before any destination of it is written, so a
// destination may be a source. Every step is elementwise, so neither tile nor fan nor vector width
// can change a result.

#include "reduce_kernels.h"

#include <type_traits>

#include "float16.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#ifndef JCOLL_ISA
#define JCOLL_ISA baseline
#endif

// The iterations of the next loop are independent: it stores to memory of our own, which nothing
// else in it overlaps.
#if defined(__clang__)
#define JCOLL_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define JCOLL_INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace jcoll {
namespace JCOLL_ISA {
namespace {

// Bytes of the accumulator. Between 2 and 16 KiB nothing changes by more than the noise of the
// machine; below, calls and loop ends cost; above, the destination's copy of a tile pushes the
// sources out of L1.
constexpr int64_t kTileBytes = 4096;

// Sources folded in a pass. Eight at a time are 1 % faster for 8 ranks and 10 % slower for 4, where
// all but the first would go alone.
constexpr int kFan = 4;

// Bytes of each source's next tile asked for while this tile is written. The hardware follows a
// stream inside a page but not across its end, and of 8 sources some tile always begins a page: 10
// to 14 % more bandwidth out of memory, 1 % in the cache. (Asking for the whole tile is slower: it
// fills the line buffers.)
constexpr int64_t kPrefetchBytes = 256;

template <typename T>
T Read(const char* base, int64_t index) {
  T value;
  __builtin_memcpy(&value, base + index * static_cast<int64_t>(sizeof(T)), sizeof(T));
  return value;
}

// ---- Copies past the cache.
//
// A store to a line that is not in the cache reads the line first; a streaming store of a whole
// line does not. One line per instruction is the fastest (on a Xeon of 2023, copying 4 KiB tiles to
// 8 places: ordinary 7, 16-byte 16, 32-byte 19.4, 64-byte 19.7 GB/s written).

#if defined(__AVX512F__)
using Lane = __m512i;
void StreamLane(void* to, Lane x) { _mm512_stream_si512(static_cast<Lane*>(to), x); }
#elif defined(__AVX2__)
using Lane = __m256i;
void StreamLane(void* to, Lane x) { _mm256_stream_si256(static_cast<Lane*>(to), x); }
#elif defined(__SSE2__)
using Lane = __m128i;
void StreamLane(void* to, Lane x) { _mm_stream_si128(static_cast<Lane*>(to), x); }
#endif

void Copy(void* dst, const void* src, int64_t nbytes) {
  __builtin_memcpy(dst, src, static_cast<size_t>(nbytes));
}

#if defined(__SSE2__)
constexpr int64_t kLine = 64;

void StreamCopy(void* to, const void* from, int64_t nbytes) {
  char* dst = static_cast<char*>(to);
  const char* src = static_cast<const char*>(from);
  const int64_t to_line = -reinterpret_cast<intptr_t>(dst) & (kLine - 1);
  const int64_t head = to_line < nbytes ? to_line : nbytes;
  Copy(dst, src, head);
  int64_t done = head;
  for (; done + kLine <= nbytes; done += kLine) {
    for (int64_t i = 0; i < kLine; i += sizeof(Lane)) {
      StreamLane(dst + done + i, Read<Lane>(src + done + i, 0));
    }
  }
  Copy(dst + done, src + done, nbytes - done);
}
void StreamFence() { _mm_sfence(); }
#else
void StreamCopy(void* dst, const void* src, int64_t nbytes) { Copy(dst, src, nbytes); }
void StreamFence() {}
#endif

// ---- Between storage and accumulation type.

template <typename T>
T Widen(T x) {
  return x;
}
float Widen(Float16 x) { return ToFloat(x); }
float Widen(BFloat16 x) { return ToFloat(x); }

template <typename T>
void Narrow(T x, T* out) {
  *out = x;
}
void Narrow(float x, Float16* out) { *out = ToFloat16(x); }
void Narrow(float x, BFloat16* out) { *out = ToBFloat16(x); }

// float16 where the machine converts it: a vector of elements is then an element of these rules,
// because the compiler would not find the instructions in integer code.
#if defined(__F16C__)
struct Halves {
  __m128i v;
};
struct Floats {
  __m256 v;
};
Floats Widen(Halves x) { return {_mm256_cvtph_ps(x.v)}; }
void Narrow(Floats x, Halves* out) { out->v = _mm256_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT); }
Floats operator+(Floats a, Floats b) { return {a.v + b.v}; }
Floats operator*(Floats a, Floats b) { return {a.v * b.v}; }
Floats operator/(Floats a, int b) { return {a.v / static_cast<float>(b)}; }
#endif

// ---- Rules: what one (dtype, op) pair does with elements.
//
// Storage and Acc are the types in memory and of the accumulator. Load: Storage -> Acc;
// Combine: (Acc, Acc) -> Acc; Store: (Acc, num_srcs) -> Storage.

template <typename S, typename A, ReduceOp kOp>
struct Arithmetic {
  using Storage = S;
  using Acc = A;
  static Acc Load(Storage x) { return Widen(x); }
  static Acc Combine(Acc a, Acc b) {
    if constexpr (kOp != ReduceOp::kProd) {
      return static_cast<Acc>(a + b);
    } else if constexpr (std::is_integral_v<Acc>) {
      return static_cast<Acc>(1u * a * b);  // uint16_t alone would promote to int, and overflow it
    } else {
      return a * b;
    }
  }
  static Storage Store(Acc x, int num_srcs) {
    if constexpr (kOp == ReduceOp::kMean) x = x / num_srcs;
    Storage result;
    Narrow(x, &result);
    return result;
  }
};

// A rule whose accumulator is in the storage type.
template <typename T>
struct Exact {
  using Storage = T;
  using Acc = T;
  static T Load(T x) { return x; }
  static T Store(T x, int) { return x; }
};

// Where it sees products with alternating signs, GCC (12 for one) makes fused multiply-adds of them
// despite -ffp-contract=off, and the result would depend on the instruction set. With the sign
// turned in an integer it sees sums only; a + (-b) is exactly a - b.
template <typename Real, typename Bits>
Real Negated(Real x) {
  Bits bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  bits ^= Bits{1} << (8 * sizeof bits - 1);
  __builtin_memcpy(&x, &bits, sizeof bits);
  return x;
}

template <typename C, typename Bits>
struct ComplexProduct : Exact<C> {
  static C Combine(C a, C b) {
    const auto minus_im = Negated<decltype(a.im), Bits>(a.im);
    return {a.re * b.re + minus_im * b.im, a.re * b.im + a.im * b.re};
  }
};

template <typename T, bool kIsMax>
struct Extremum : Exact<T> {
  static T Combine(T a, T b) { return (kIsMax ? a > b : a < b) ? a : b; }
};

// min and max of floating types. Read as signed integers, positive floating values are in order,
// and negative ones in reverse; flipping the magnitude bits of the negative ones (an involution)
// makes one order of all, with -0 just below +0. A NaN is given the sign that makes it win. What
// remains is an integer min or max: one vector instruction, exact for denormals in any mode of the
// thread, and half the width of float for the 16-bit types.
template <typename Key, Key kInfinity, bool kIsMax>
struct FloatExtremum : Extremum<Key, kIsMax> {
  static constexpr Key kMagnitude = static_cast<Key>(std::make_unsigned_t<Key>(-1) / 2);
  static Key Flip(Key x) { return static_cast<Key>(x < 0 ? x ^ kMagnitude : x); }
  static Key Load(Key x) {
    const Key magnitude = static_cast<Key>(x & kMagnitude);
    const Key nan = kIsMax ? magnitude : static_cast<Key>(x | ~kMagnitude);
    return Flip(magnitude > kInfinity ? nan : x);
  }
  static Key Store(Key x, int) { return Flip(x); }
};

template <typename T, bool kIsAnd>
struct Bitwise : Exact<T> {
  static T Combine(T a, T b) { return static_cast<T>(kIsAnd ? a & b : a | b); }
};

template <bool kIsAnd>
struct Logical : Bitwise<uint8_t, kIsAnd> {
  static uint8_t Load(uint8_t x) { return x != 0; }
};

// ---- Loops.

// acc = acc, src[0], src[1], ... combined from left to right; without acc when kFirst.
template <typename Rule, int kNumSrcs, bool kFirst>
void Fold(const void* const* srcs, int64_t begin, typename Rule::Acc* acc, int64_t n) {
  using Storage = typename Rule::Storage;
  const char* src[kNumSrcs];
  for (int k = 0; k < kNumSrcs; ++k) {
    src[k] = static_cast<const char*>(srcs[k]) + begin * static_cast<int64_t>(sizeof(Storage));
  }
  JCOLL_INDEPENDENT
  for (int64_t i = 0; i < n; ++i) {
    typename Rule::Acc value = kFirst ? Rule::Load(Read<Storage>(src[0], i)) : acc[i];
    for (int k = kFirst ? 1 : 0; k < kNumSrcs; ++k) {
      value = Rule::Combine(value, Rule::Load(Read<Storage>(src[k], i)));
    }
    acc[i] = value;
  }
}

template <typename Rule>
void FoldAll(const void* const* srcs, int num_srcs, int64_t begin, typename Rule::Acc* acc,
             int64_t n) {
  int k = num_srcs >= kFan ? kFan : 1;
  if (k == kFan) {
    Fold<Rule, kFan, true>(srcs, begin, acc, n);
  } else {
    Fold<Rule, 1, true>(srcs, begin, acc, n);
  }
  for (; k + kFan <= num_srcs; k += kFan) Fold<Rule, kFan, false>(srcs + k, begin, acc, n);
  for (; k < num_srcs; ++k) Fold<Rule, 1, false>(srcs + k, begin, acc, n);
}

template <typename Rule>
void StoreAll(const typename Rule::Acc* acc, int num_srcs, typename Rule::Storage* out, int64_t n) {
  JCOLL_INDEPENDENT
  for (int64_t i = 0; i < n; ++i) out[i] = Rule::Store(acc[i], num_srcs);
}

void Prefetch(const void* const* srcs, int num_srcs, int64_t offset, int64_t nbytes) {
  for (int k = 0; k < num_srcs; ++k) {
    const char* src = static_cast<const char*>(srcs[k]) + offset;
    for (int64_t i = 0; i < nbytes && i < kPrefetchBytes; i += 64) __builtin_prefetch(src + i);
  }
}

void Distribute(const void* tile, void* const* dsts, int num_dsts, int64_t offset, int64_t nbytes,
                bool stream) {
  for (int d = 0; d < num_dsts; ++d) {
    char* dst = static_cast<char*>(dsts[d]) + offset;
    if (stream) {
      StreamCopy(dst, tile, nbytes);
    } else {
      Copy(dst, tile, nbytes);
    }
  }
}

// Elements begin .. end - 1.
template <typename Rule>
void RunRange(const void* const* srcs, int num_srcs, void* const* dsts, int num_dsts, int64_t begin,
              int64_t end, bool stream) {
  using Storage = typename Rule::Storage;
  using Acc = typename Rule::Acc;
  constexpr int64_t kTile = kTileBytes / sizeof(Acc), kSize = sizeof(Storage);
  constexpr bool kInPlace = std::is_same_v<Storage, Acc>;
  alignas(64) Acc acc[kTile];
  alignas(64) Storage narrow[kInPlace ? 1 : kTile];
  Storage* out;
  if constexpr (kInPlace) {
    out = acc;
  } else {
    out = narrow;
  }
  for (int64_t tile = begin; tile < end; tile += kTile) {
    const int64_t n = end - tile < kTile ? end - tile : kTile;
    FoldAll<Rule>(srcs, num_srcs, tile, acc, n);
    Prefetch(srcs, num_srcs, (tile + n) * kSize, (end - tile - n) * kSize);
    StoreAll<Rule>(acc, num_srcs, out, n);
    Distribute(out, dsts, num_dsts, tile * kSize, n * kSize, stream);
  }
  if (stream) StreamFence();
}

template <typename Rule>
void Run(const void* const* srcs, int num_srcs, void* const* dsts, int num_dsts, int64_t count,
         bool stream) {
  RunRange<Rule>(srcs, num_srcs, dsts, num_dsts, 0, count, stream);
}

// A complex number is a pair of reals as far as sums and means are concerned.
template <typename Rule>
void RunPairs(const void* const* srcs, int num_srcs, void* const* dsts, int num_dsts, int64_t count,
              bool stream) {
  RunRange<Rule>(srcs, num_srcs, dsts, num_dsts, 0, 2 * count, stream);
}

template <ReduceOp kOp>
void RunFloat16(const void* const* srcs, int num_srcs, void* const* dsts, int num_dsts,
                int64_t count, bool stream) {
  int64_t done = 0;
#if defined(__F16C__)
  constexpr int64_t kWidth = sizeof(Halves) / sizeof(Float16);
  const int64_t vectors = count / kWidth;
  RunRange<Arithmetic<Halves, Floats, kOp>>(srcs, num_srcs, dsts, num_dsts, 0, vectors, stream);
  done = vectors * kWidth;
#endif
  RunRange<Arithmetic<Float16, float, kOp>>(srcs, num_srcs, dsts, num_dsts, done, count, stream);
}

// ---- The table.

template <typename Storage, typename Accum, ReduceOp kOp>
constexpr ReduceFn SelectArithmetic() {
  constexpr bool kIsMean = kOp == ReduceOp::kMean, kIsProd = kOp == ReduceOp::kProd;
  if constexpr (std::is_same_v<Storage, Bool> || (std::is_integral_v<Storage> && kIsMean)) {
    return nullptr;
  } else if constexpr (std::is_same_v<Storage, Float16>) {
    return RunFloat16<kOp>;
  } else if constexpr (std::is_integral_v<Storage>) {
    return Run<Arithmetic<Accum, Accum, kOp>>;
  } else if constexpr (std::is_class_v<Accum> && kIsProd) {
    using Bits = std::conditional_t<sizeof(Accum) == 8, uint32_t, uint64_t>;
    return Run<ComplexProduct<Storage, Bits>>;
  } else if constexpr (std::is_class_v<Accum>) {
    using Real = decltype(Accum::re);
    return RunPairs<Arithmetic<Real, Real, kOp>>;
  } else {
    return Run<Arithmetic<Storage, Accum, kOp>>;
  }
}

template <typename Storage, bool kIsMax>
constexpr ReduceFn SelectExtremum() {
  if constexpr (std::is_integral_v<Storage>) return Run<Extremum<Storage, kIsMax>>;
  if constexpr (std::is_same_v<Storage, Bool>) return Run<Logical<!kIsMax>>;
  if constexpr (std::is_same_v<Storage, Float16>) {
    return Run<FloatExtremum<int16_t, 0x7c00, kIsMax>>;
  }
  if constexpr (std::is_same_v<Storage, BFloat16>) {
    return Run<FloatExtremum<int16_t, 0x7f80, kIsMax>>;
  }
  if constexpr (std::is_same_v<Storage, float>) {
    return Run<FloatExtremum<int32_t, 0x7f800000, kIsMax>>;
  }
  if constexpr (std::is_same_v<Storage, double>) {
    return Run<FloatExtremum<int64_t, 0x7ff0000000000000, kIsMax>>;
  }
  return nullptr;
}

template <typename Storage, typename Accum, bool kIsAnd>
constexpr ReduceFn SelectBitwise() {
  if constexpr (std::is_integral_v<Storage>) return Run<Bitwise<Accum, kIsAnd>>;
  if constexpr (std::is_same_v<Storage, Bool>) return Run<Logical<kIsAnd>>;
  return nullptr;
}

}  // namespace

extern const KernelTable kKernels;
// clang-format off
constexpr KernelTable kKernels = {
    StreamCopy,
    StreamFence,
    {
// A row per dtype, in the order of ReduceOp.
#define JCOLL_DTYPE(enumerator, name, Storage, Accum)   \
  {SelectArithmetic<Storage, Accum, ReduceOp::kSum>(),  \
   SelectArithmetic<Storage, Accum, ReduceOp::kMean>(), \
   SelectArithmetic<Storage, Accum, ReduceOp::kProd>(), \
   SelectExtremum<Storage, false>(),                    \
   SelectExtremum<Storage, true>(),                     \
   SelectBitwise<Storage, Accum, true>(),               \
   SelectBitwise<Storage, Accum, false>()},
#include "dtypes.def"
#undef JCOLL_DTYPE
    }};
// clang-format on

}  // namespace JCOLL_ISA
}  // namespace jcoll
