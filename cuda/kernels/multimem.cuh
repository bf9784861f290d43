// The two instructions of NVLink's switch (NVLS, sm_90): a load of 16 bytes that the switch reduces
// over all ranks' memory behind a multicast address, and a store of 16 bytes to all of it.
//
// Both are relaxed, and ordered by the barriers as other accesses are. By the rule of PeerTable, a
// kernel uses either the multicast address or the others for any place.
#pragma once

#include "cuda/kernels/elements.cuh"
#include "cuda/kernels/vector.cuh"

namespace jcoll::gpu {

// 16 bytes of elements.
template <typename S>
using MultimemVec = Vec<S, 16 / sizeof(S)>;

#if defined(JCOLL_EMULATOR)

// In the order of the ranks, which the hardware does not promise; sums of 16-bit floats are formed
// in float and rounded once, as the hardware's are with .acc::f32.
template <typename S, typename Op>
MultimemVec<S> multimem_ld_reduce(const void* p) {
  using V = MultimemVec<S>;
  emulator::CountLoad(p, sizeof(V));
  const emulator::Replicas replicas = emulator::Resolve(p);
  decltype(Widen(S())) acc[V::kSize] = {};
  for (int r = 0; r < replicas.num_ranks; ++r) {
    V v;
    memcpy(&v, replicas[r], sizeof v);
    for (int e = 0; e < V::kSize; ++e) {
      acc[e] = r == 0 ? Widen(v.e[e]) : Op::Combine(acc[e], Widen(v.e[e]));
    }
  }
  V result;
  for (int e = 0; e < V::kSize; ++e) Narrow(acc[e], &result.e[e]);
  return result;
}

template <typename S>
void multimem_st(void* p, const MultimemVec<S>& value) {
  emulator::CountStore(p, sizeof value);
  const emulator::Replicas replicas = emulator::Resolve(p);
  for (int r = 0; r < replicas.num_ranks; ++r) memcpy(replicas[r], &value, sizeof value);
}

#elif !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

#define JCOLL_MULTIMEM_VECTOR(S, Op, suffix)                                                  \
  template <>                                                                                 \
  struct MultimemLoad<S, Op> {                                                                \
    __device__ static MultimemVec<S> At(const void* p) {                                      \
      uint4 v;                                                                                \
      asm volatile("multimem.ld_reduce.relaxed.sys.global." suffix " {%0, %1, %2, %3}, [%4];" \
                   : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)                               \
                   : "l"(p)                                                                   \
                   : "memory");                                                               \
      return BitCast<MultimemVec<S>>(v);                                                      \
    }                                                                                         \
  };
// Types that have no vector form: several loads, which are in flight together.
#define JCOLL_MULTIMEM_SCALARS(S, Op, suffix, constraint)                         \
  template <>                                                                     \
  struct MultimemLoad<S, Op> {                                                    \
    __device__ static MultimemVec<S> At(const void* p) {                          \
      MultimemVec<S> v;                                                           \
      JCOLL_UNROLL                                                                \
      for (int e = 0; e < v.kSize; ++e) {                                         \
        asm volatile("multimem.ld_reduce.relaxed.sys.global." suffix " %0, [%1];" \
                     : constraint(v.e[e])                                         \
                     : "l"(static_cast<const S*>(p) + e)                          \
                     : "memory");                                                 \
      }                                                                           \
      return v;                                                                   \
    }                                                                             \
  };

template <typename S, typename Op>
struct MultimemLoad;
JCOLL_MULTIMEM_VECTOR(Float16, Sum, "add.acc::f32.v4.f16x2")
JCOLL_MULTIMEM_VECTOR(BFloat16, Sum, "add.acc::f32.v4.bf16x2")
template <>
struct MultimemLoad<float, Sum> {
  __device__ static MultimemVec<float> At(const void* p) {
    float4 v;
    asm volatile("multimem.ld_reduce.relaxed.sys.global.add.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "l"(p)
                 : "memory");
    return BitCast<MultimemVec<float>>(v);
  }
};
JCOLL_MULTIMEM_SCALARS(double, Sum, "add.f64", "=d")
JCOLL_MULTIMEM_SCALARS(uint32_t, Sum, "add.u32", "=r")
JCOLL_MULTIMEM_SCALARS(uint32_t, Min, "min.u32", "=r")
JCOLL_MULTIMEM_SCALARS(uint32_t, Max, "max.u32", "=r")
JCOLL_MULTIMEM_SCALARS(int32_t, Min, "min.s32", "=r")
JCOLL_MULTIMEM_SCALARS(int32_t, Max, "max.s32", "=r")
JCOLL_MULTIMEM_SCALARS(uint64_t, Sum, "add.u64", "=l")
JCOLL_MULTIMEM_SCALARS(uint64_t, Min, "min.u64", "=l")
JCOLL_MULTIMEM_SCALARS(uint64_t, Max, "max.u64", "=l")
JCOLL_MULTIMEM_SCALARS(int64_t, Min, "min.s64", "=l")
JCOLL_MULTIMEM_SCALARS(int64_t, Max, "max.s64", "=l")
#undef JCOLL_MULTIMEM_VECTOR
#undef JCOLL_MULTIMEM_SCALARS

template <typename S, typename Op>
__device__ __forceinline__ MultimemVec<S> multimem_ld_reduce(const void* p) {
  return MultimemLoad<S, Op>::At(p);
}

template <typename S>
__device__ __forceinline__ void multimem_st(void* p, const MultimemVec<S>& value) {
  const float4 v = BitCast<float4>(value);
  asm volatile("multimem.st.relaxed.sys.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p), "f"(v.x),
               "f"(v.y), "f"(v.z), "f"(v.w)
               : "memory");
}

#else

// sm_80 has no such instructions, and Refusal keeps the kernels off it.
template <typename S, typename Op>
__device__ __forceinline__ MultimemVec<S> multimem_ld_reduce(const void*) {
  __trap();
  return {};
}
template <typename S>
__device__ __forceinline__ void multimem_st(void*, const MultimemVec<S>&) {
  __trap();
}

#endif

}  // namespace jcoll::gpu
