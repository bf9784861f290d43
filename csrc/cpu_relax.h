// For loops that wait without sleeping.
#pragma once

namespace jcoll {

// Leaves the core's resources to its other hardware thread for a moment.
inline void CpuRelax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace jcoll
