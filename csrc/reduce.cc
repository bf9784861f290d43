#include "reduce.h"

#include <atomic>

#include "reduce_kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace jcoll {
namespace {

constexpr const char* kOpNames[kNumReduceOps] = {"sum", "mean", "prod", "min", "max", "and", "or"};

struct Isa {
  const char* name;
  const KernelTable* kernels;
  bool (*available)();
};

bool Always() { return true; }

#if defined(__x86_64__)
// These ask the operating system too: a processor may have registers which the system does not
// save.
bool HasAvx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}
bool HasAvx512() {
  return HasAvx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
#endif

constexpr Isa kIsas[] = {// best first
#if defined(__x86_64__)
                         {"avx512", &avx512::kKernels, HasAvx512},
                         {"avx2", &avx2::kKernels, HasAvx2},
#endif
                         {"baseline", &baseline::kKernels, Always}};

const Isa* Best() {
  for (const Isa& isa : kIsas) {
    if (isa.available()) return &isa;
  }
  return nullptr;  // not reached: the baseline is always available
}

std::atomic<const Isa*>& Current() {
  static std::atomic<const Isa*> current{Best()};
  return current;
}

}  // namespace

const char* Name(ReduceOp op) { return kOpNames[static_cast<int>(op)]; }

bool ParseReduceOp(std::string_view name, ReduceOp* op) {
  for (int i = 0; i < kNumReduceOps; ++i) {
    if (name != kOpNames[i]) continue;
    *op = static_cast<ReduceOp>(i);
    return true;
  }
  return false;
}

const KernelTable& CurrentKernels() { return *Current().load(std::memory_order_relaxed)->kernels; }

ReduceFn GetReduceFn(DType dtype, ReduceOp op) {
  return CurrentKernels().fn[static_cast<int>(dtype)][static_cast<int>(op)];
}

bool Supports(DType dtype, ReduceOp op) { return GetReduceFn(dtype, op) != nullptr; }

void Reduce(DType dtype, ReduceOp op, const void* const* srcs, int num_srcs, void* const* dsts,
            int num_dsts, int64_t count, bool stream) {
  GetReduceFn(dtype, op)(srcs, num_srcs, dsts, num_dsts, count, stream);
}

const char* IsaName() { return Current().load(std::memory_order_relaxed)->name; }

bool SetIsa(std::string_view name) {
  for (const Isa& isa : kIsas) {
    if (name != isa.name || !isa.available()) continue;
    Current().store(&isa, std::memory_order_relaxed);
    return true;
  }
  return false;
}

#if defined(__x86_64__)

ScopedFlushDenormals::ScopedFlushDenormals() : saved_(_mm_getcsr()) {
  constexpr unsigned kFlushToZero = 1u << 15, kDenormalsAreZero = 1u << 6;
  _mm_setcsr(static_cast<unsigned>(saved_) | kFlushToZero | kDenormalsAreZero);
}
ScopedFlushDenormals::~ScopedFlushDenormals() { _mm_setcsr(static_cast<unsigned>(saved_)); }

#elif defined(__aarch64__)

ScopedFlushDenormals::ScopedFlushDenormals() {
  constexpr uint64_t kFlushToZero = uint64_t{1} << 24;
  asm volatile("mrs %0, fpcr" : "=r"(saved_));
  asm volatile("msr fpcr, %0" : : "r"(saved_ | kFlushToZero));
}
ScopedFlushDenormals::~ScopedFlushDenormals() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }

#else

ScopedFlushDenormals::ScopedFlushDenormals() : saved_(0) {}
ScopedFlushDenormals::~ScopedFlushDenormals() {}

#endif

}  // namespace jcoll
