// The GPUs that the tests run on. In CI they are the emulator's, one per rank; in `make gpu-check`
// all ranks share a real one, on which their kernels run side by side. Both headers have the same
// names.
#pragma once

#ifdef JCOLL_EMULATOR
#include "tests/cuda/gpu_emulated.h"
#else
#include "tests/cuda/gpu_real.h"
#endif
