// Every instruction whose order other threads can see. PTX names them; the emulator has
// std::atomic's equals, on plain memory. Nothing else in cuda/ may be sensitive to memory order.
//
// `sys` is the scope of all GPUs and the host, `gpu` that of one GPU.
#pragma once

#include <chrono>
#include <cstdint>

#include "cuda/kernels/language.cuh"

namespace jcoll::gpu {

// What LL moves: 8 bytes of data, each 4 of them with the flag that says in which exchange they
// were sent. A half is accessed at once and never torn; the two may arrive apart.
struct alignas(16) Line {
  uint64_t half[2];

  static __device__ Line Make(uint64_t data, uint32_t flag) {
    const uint64_t high = uint64_t{flag} << 32;
    return {{(data & 0xffffffffu) | high, (data >> 32) | high}};
  }
  __device__ bool Has(uint32_t flag) const {
    return half[0] >> 32 == flag && half[1] >> 32 == flag;
  }
  __device__ uint64_t data() const { return (half[0] & 0xffffffffu) | half[1] << 32; }
};

#ifndef JCOLL_EMULATOR

__device__ __forceinline__ uint32_t ld_relaxed_sys(const uint32_t* p) {
  uint32_t value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
  return value;
}
__device__ __forceinline__ uint64_t ld_relaxed_sys(const uint64_t* p) {
  uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(p) : "memory");
  return value;
}
__device__ __forceinline__ uint32_t ld_acquire_sys(const uint32_t* p) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
  return value;
}
__device__ __forceinline__ void st_relaxed_sys(uint32_t* p, uint32_t value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}
__device__ __forceinline__ void st_relaxed_sys(uint64_t* p, uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(value) : "memory");
}
__device__ __forceinline__ void st_release_sys(uint32_t* p, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}

// For a signal that says "I have loaded what you may now overwrite", and for its receiver. A load
// whose value has arrived is over, and the block barrier before the signal waits for the values:
// no fence is needed, which would wait for stores too.
__device__ __forceinline__ void st_after_loads_sys(uint32_t* p, uint32_t value) {
  st_relaxed_sys(p, value);
}
__device__ __forceinline__ uint32_t ld_before_stores_sys(const uint32_t* p) {
  return ld_relaxed_sys(p);
}

// Stores `desired` if it finds `expected`; returns what it found.
__device__ __forceinline__ uint32_t cas_relaxed_sys(uint32_t* p, uint32_t expected,
                                                    uint32_t desired) {
  uint32_t found;
  asm volatile("atom.relaxed.sys.global.cas.b32 %0, [%1], %2, %3;"
               : "=r"(found)
               : "l"(p), "r"(expected), "r"(desired)
               : "memory");
  return found;
}
// Both return what they found.
__device__ __forceinline__ uint32_t exchange_relaxed_sys(uint32_t* p, uint32_t value) {
  uint32_t found;
  asm volatile("atom.relaxed.sys.global.exch.b32 %0, [%1], %2;"
               : "=r"(found)
               : "l"(p), "r"(value)
               : "memory");
  return found;
}
__device__ __forceinline__ uint32_t add_acq_rel_gpu(uint32_t* p, uint32_t value) {
  uint32_t found;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(found)
               : "l"(p), "r"(value)
               : "memory");
  return found;
}

__device__ __forceinline__ Line ld_line_relaxed_sys(const Line* p) {
  Line line;
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(line.half[0]), "=l"(line.half[1])
               : "l"(p)
               : "memory");
  return line;
}
__device__ __forceinline__ void st_line_relaxed_sys(Line* p, const Line& line) {
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(p), "l"(line.half[0]),
               "l"(line.half[1])
               : "memory");
}

// Nanoseconds; the clock is the same for all threads of a GPU, and steps by up to a microsecond.
__device__ __forceinline__ uint64_t global_timer_ns() {
  uint64_t ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  return ns;
}

// Between two looks of a thread that waits.
__device__ __forceinline__ void pause() {}

#else  // JCOLL_EMULATOR

template <typename T>
T ld_relaxed_sys(const T* p) {
  emulator::Step();
  return __atomic_load_n(p, __ATOMIC_RELAXED);
}
inline uint32_t ld_acquire_sys(const uint32_t* p) {
  emulator::Step();
  return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}
inline void st_relaxed_sys(uint32_t* p, uint32_t value) {
  emulator::Step();
  __atomic_store_n(p, value, __ATOMIC_RELAXED);
}
inline void st_relaxed_sys(uint64_t* p, uint64_t value) {
  emulator::Step();
  __atomic_store_n(p, value, __ATOMIC_RELAXED);
}
inline void st_release_sys(uint32_t* p, uint32_t value) {
  emulator::Step();
  __atomic_store_n(p, value, __ATOMIC_RELEASE);
}

// C++ has no weaker words for these.
inline void st_after_loads_sys(uint32_t* p, uint32_t value) { st_release_sys(p, value); }
inline uint32_t ld_before_stores_sys(const uint32_t* p) { return ld_acquire_sys(p); }

inline uint32_t cas_relaxed_sys(uint32_t* p, uint32_t expected, uint32_t desired) {
  emulator::Step();
  __atomic_compare_exchange_n(p, &expected, desired, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return expected;
}
inline uint32_t exchange_relaxed_sys(uint32_t* p, uint32_t value) {
  emulator::Step();
  return __atomic_exchange_n(p, value, __ATOMIC_RELAXED);
}
inline uint32_t add_acq_rel_gpu(uint32_t* p, uint32_t value) {
  emulator::Step();
  return __atomic_fetch_add(p, value, __ATOMIC_ACQ_REL);
}

inline Line ld_line_relaxed_sys(const Line* p) {
  emulator::Step();
  Line line;
  line.half[0] = __atomic_load_n(&p->half[0], __ATOMIC_RELAXED);
  line.half[1] = __atomic_load_n(&p->half[1], __ATOMIC_RELAXED);
  return line;
}
inline void st_line_relaxed_sys(Line* p, const Line& line) {
  emulator::Step();
  emulator::CountStore(p, sizeof(Line));
  __atomic_store_n(&p->half[0], line.half[0], __ATOMIC_RELAXED);
  emulator::Step();  // The halves may arrive apart.
  __atomic_store_n(&p->half[1], line.half[1], __ATOMIC_RELAXED);
}

inline uint64_t global_timer_ns() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return static_cast<uint64_t>(std::chrono::nanoseconds(now).count());
}
inline void pause() { emulator::Pause(); }

#endif

}  // namespace jcoll::gpu
