#ifndef JCOLL_REDUCE_KERNELS_H_
#define JCOLL_REDUCE_KERNELS_H_

#include "reduce.h"

// reduce_kernels.cc is compiled once for each namespace below, with -DJCOLL_ISA=<namespace> and:
//   avx2    -mavx2 -mfma -mf16c
//   avx512  the same and -mavx512f -mavx512bw -mavx512vl -mavx512dq
// reduce.cc must not choose a table on a machine which lacks one of these.
//
// Everything in such an object but its table must have internal linkage. The linker keeps one copy
// of an inline function or template, and if it kept one made of AVX-512 the baseline would use it
// too. So kernels call no function of the standard library and no inline one of ours that is not
// static.

namespace jcoll {

struct KernelTable {
  // A copy whose stores bypass the cache, and the fence that must follow the last one before
  // another thread is told that the data is there.
  void (*stream_copy)(void* dst, const void* src, int64_t nbytes);
  void (*stream_fence)();
  ReduceFn fn[kNumDTypes][kNumReduceOps];  // null where the pair is not supported
};

// The table in use; see SetIsa.
const KernelTable& CurrentKernels();

namespace baseline {
extern const KernelTable kKernels;
}
#if defined(__x86_64__)
namespace avx2 {
extern const KernelTable kKernels;
}
namespace avx512 {
extern const KernelTable kKernels;
}
#endif

}  // namespace jcoll

#endif  // JCOLL_REDUCE_KERNELS_H_
