// What stands for <cuda_runtime_api.h> where there is no CUDA: the types that launch.h mentions,
// under CUDA's names and with CUDA's numbers.
#pragma once

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
};

struct CUstream_st;  // See emulator.h.
using cudaStream_t = CUstream_st*;
