// Wide accesses to data in own and in peers' memory, and how the elements of a range are dealt to
// the threads of the grid: 16 bytes at a time where the addresses allow it, several loads in
// flight.
//
// These are weak accesses: the barriers of signal.cuh order them.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/kernels/language.cuh"

namespace jcoll::gpu {

template <typename To, typename From>
__device__ __forceinline__ To BitCast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

template <typename T>
struct Tag {
  using Type = T;
};
template <int kValue>
using Int = std::integral_constant<int, kValue>;

// Consecutive elements which one instruction loads or stores.
template <typename S, int kElements>
struct alignas(sizeof(S) * kElements) Vec {
  static constexpr int kSize = kElements;
  S e[kElements];
};

constexpr int kMaxVecNbytes = 16;

#ifdef JCOLL_EMULATOR

template <typename V>
V Load(const void* p) {
  emulator::CountLoad(p, sizeof(V));
  V value;
  memcpy(&value, p, sizeof(V));
  return value;
}
template <typename V>
void Store(void* p, const V& value) {
  emulator::CountStore(p, sizeof(V));
  memcpy(p, &value, sizeof(V));
}

#else

// The integers whose loads and stores are one instruction of that size.
template <int kNbytes>
struct Word;
template <>
struct Word<1> : Tag<uint8_t> {};
template <>
struct Word<2> : Tag<uint16_t> {};
template <>
struct Word<4> : Tag<uint32_t> {};
template <>
struct Word<8> : Tag<uint2> {};
template <>
struct Word<16> : Tag<uint4> {};

template <typename V>
__device__ __forceinline__ V Load(const void* p) {
  return BitCast<V>(*static_cast<const typename Word<sizeof(V)>::Type*>(p));
}
template <typename V>
__device__ __forceinline__ void Store(void* p, const V& value) {
  using W = typename Word<sizeof(V)>::Type;
  *static_cast<W*>(p) = BitCast<W>(value);
}

#endif

// How the addresses of arrays that are gone through together lie to the 16-byte boundaries.
class Alignment {
 public:
  __device__ explicit Alignment(const void* p) : first_(reinterpret_cast<uintptr_t>(p)) {}
  __device__ void Add(const void* p) { differences_ |= reinterpret_cast<uintptr_t>(p) ^ first_; }

  // The widest access that is aligned in all arrays at once, at some elements: 16, 8, 4, 2 or 1.
  __device__ int width() const {
    const auto low = static_cast<int>(differences_ & (kMaxVecNbytes - 1));
    return low == 0 ? kMaxVecNbytes : low & -low;
  }
  // Bytes before the first such place.
  __device__ int head(int width) const { return static_cast<int>(-first_ & (width - 1)); }

 private:
  uintptr_t first_, differences_ = 0;
};

// Calls body(Tag<V>, Int<ways>, i, stride) so that the elements [0, count) of type S are dealt to
// `num_threads` threads: each call is for the vectors V at the elements i, i + stride, ..., kWays
// or 1 of them. Vectors have kElements, but for the elements in front of the first `head` and
// behind the last whole vector, which go alone.
template <typename S, int kElements, int kWays, typename F>
__device__ __forceinline__ void DealVectors(int64_t count, int64_t head, int64_t thread,
                                            int64_t num_threads, F body) {
  if (head > count) head = count;
  const int64_t num_vectors = (count - head) / kElements;
  const int64_t tail = head + num_vectors * kElements;
  using V = Vec<S, kElements>;
  const int64_t stride = num_threads * kElements;
  int64_t i = head + thread * kElements;
  for (; i + (kWays - 1) * stride < tail; i += kWays * stride) {
    body(Tag<V>(), Int<kWays>(), i, stride);
  }
  for (; i < tail; i += stride) body(Tag<V>(), Int<1>(), i, stride);
  const int64_t num_alone = head + (count - tail);
  for (int64_t j = thread; j < num_alone; j += num_threads) {
    body(Tag<Vec<S, 1>>(), Int<1>(), j < head ? j : tail + (j - head), 1);
  }
}

}  // namespace jcoll::gpu
