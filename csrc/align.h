// Arithmetic of sizes and alignments.
#pragma once

#include <cstdint>

namespace jcoll {

// A cache line. Elements are of 1, 2, 4, 8 or 16 bytes: a line holds whole ones.
constexpr int64_t kLineNbytes = 64;

constexpr int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t RoundUp(int64_t a, int64_t unit) { return CeilDiv(a, unit) * unit; }

}  // namespace jcoll
