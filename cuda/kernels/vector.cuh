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

// One instruction for each size. In C++ the compiler may, and does, load a vector of small elements
// element by element.
__device__ __forceinline__ void LoadWords(const void* p, uint8_t* word) {
  uint32_t x;
  asm volatile("ld.global.u8 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
  *word = static_cast<uint8_t>(x);
}
__device__ __forceinline__ void LoadWords(const void* p, uint16_t* word) {
  asm volatile("ld.global.u16 %0, [%1];" : "=h"(*word) : "l"(p) : "memory");
}
__device__ __forceinline__ void LoadWords(const void* p, uint32_t* word) {
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(*word) : "l"(p) : "memory");
}
__device__ __forceinline__ void LoadWords(const void* p, uint2* words) {
  asm volatile("ld.global.v2.u32 {%0, %1}, [%2];"
               : "=r"(words->x), "=r"(words->y)
               : "l"(p)
               : "memory");
}
__device__ __forceinline__ void LoadWords(const void* p, uint4* words) {
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words->x), "=r"(words->y), "=r"(words->z), "=r"(words->w)
               : "l"(p)
               : "memory");
}

__device__ __forceinline__ void StoreWords(void* p, uint8_t word) {
  asm volatile("st.global.u8 [%0], %1;" ::"l"(p), "r"(uint32_t{word}) : "memory");
}
__device__ __forceinline__ void StoreWords(void* p, uint16_t word) {
  asm volatile("st.global.u16 [%0], %1;" ::"l"(p), "h"(word) : "memory");
}
__device__ __forceinline__ void StoreWords(void* p, uint32_t word) {
  asm volatile("st.global.u32 [%0], %1;" ::"l"(p), "r"(word) : "memory");
}
__device__ __forceinline__ void StoreWords(void* p, const uint2& words) {
  asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(p), "r"(words.x), "r"(words.y) : "memory");
}
__device__ __forceinline__ void StoreWords(void* p, const uint4& words) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(words.x), "r"(words.y),
               "r"(words.z), "r"(words.w)
               : "memory");
}

template <int kNbytes>
struct Words;
template <>
struct Words<1> : Tag<uint8_t> {};
template <>
struct Words<2> : Tag<uint16_t> {};
template <>
struct Words<4> : Tag<uint32_t> {};
template <>
struct Words<8> : Tag<uint2> {};
template <>
struct Words<16> : Tag<uint4> {};

template <typename V>
__device__ __forceinline__ V Load(const void* p) {
  typename Words<sizeof(V)>::Type words;
  LoadWords(p, &words);
  return BitCast<V>(words);
}
template <typename V>
__device__ __forceinline__ void Store(void* p, const V& value) {
  StoreWords(p, BitCast<typename Words<sizeof(V)>::Type>(value));
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
