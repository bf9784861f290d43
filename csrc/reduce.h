#ifndef JCOLL_REDUCE_H_
#define JCOLL_REDUCE_H_

#include <cstdint>
#include <string_view>

#include "dtype.h"

// Elementwise reduction of arrays in the same address space: the arithmetic of every collective.
//
// The result is a function of the source values and their order alone. It is the same bits on every
// instruction set, on every thread (under ScopedFlushDenormals), for every way of cutting the range
// into calls, and in every destination. One thing is left open: the sign and payload of a NaN in a
// sum or product that met more than one.

namespace jcoll {

enum class ReduceOp : uint8_t { kSum, kMean, kProd, kMin, kMax, kAnd, kOr };
constexpr int kNumReduceOps = 7;

const char* Name(ReduceOp op);  // "sum", "mean", "prod", "min", "max", "and", "or"

// The inverse of Name. Returns false, and leaves *op alone, when no op has that name.
bool ParseReduceOp(std::string_view name, ReduceOp* op);

// mean: floating and complex types. min, max: all but complex. and, or: integers (bitwise) and bool
// (logical). sum, prod: all but bool, which the caller casts to the integer type that it wants.
bool Supports(DType dtype, ReduceOp op);

// Reduces num_srcs >= 1 arrays of `count` >= 0 elements in source order, ((s0 + s1) + s2) + ...,
// and writes the same result to num_dsts >= 1 arrays.
//
// float16 and bfloat16 accumulate in float and round once. mean divides by num_srcs in the
// accumulation type. Integers wrap. min and max: NaN in any source gives NaN, and -0 < +0.
// Denormal numbers take part in sums as the thread's mode says, and are always kept by min and max.
// A complex product is (ar*br - ai*bi, ar*bi + ai*br); it recovers no infinity from a NaN.
//
// A destination may be the same pointer as a source; they must not overlap otherwise. Pointers may
// have any byte alignment. `stream` bypasses the cache when it writes: for destinations which are
// so large that the reader finds them in memory anyway (see ShouldStream in memory.h).
//
// Safe to call from many threads on disjoint ranges. Does not allocate; uses < 16 KiB of stack.
using ReduceFn = void (*)(const void* const* srcs, int num_srcs, void* const* dsts, int num_dsts,
                          int64_t count, bool stream);

// The function for a pair, for the instruction set in use now; null when it is not supported.
ReduceFn GetReduceFn(DType dtype, ReduceOp op);

// GetReduceFn and call. Precondition: Supports(dtype, op).
void Reduce(DType dtype, ReduceOp op, const void* const* srcs, int num_srcs, void* const* dsts,
            int num_dsts, int64_t count, bool stream);

// The instruction set in use: "avx512", "avx2" or "baseline". At start, the best this machine has.
const char* IsaName();

// Uses another one from now on; for tests and for the environment variable JCOLL_ISA, which the
// caller reads. Returns false, and changes nothing, when the name is unknown or the machine lacks
// it.
bool SetIsa(std::string_view name);

// While it lives, arithmetic of the calling thread takes and gives zero for denormal numbers (x86:
// DAZ and FTZ, AArch64: FZ; elsewhere nothing). XLA:CPU runs its programs like this, so that a
// reduction must do so too on whichever thread it runs, or its result would depend on the thread.
class ScopedFlushDenormals {
 public:
  ScopedFlushDenormals();
  ~ScopedFlushDenormals();
  ScopedFlushDenormals(const ScopedFlushDenormals&) = delete;
  ScopedFlushDenormals& operator=(const ScopedFlushDenormals&) = delete;

 private:
  uint64_t saved_;
};

}  // namespace jcoll

#endif  // JCOLL_REDUCE_H_
