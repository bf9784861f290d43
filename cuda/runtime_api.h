// The part of the CUDA runtime that the kernels' host side uses: CUDA's own, or the emulator's.
#pragma once

#ifdef JCOLL_EMULATOR
#include "cuda/emulator/runtime_types.h"
#else
#include <cuda_runtime_api.h>
#endif
