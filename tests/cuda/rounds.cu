#include "tests/cuda/rounds.h"

#include "cuda/kernels/language.cuh"

namespace rounds {
namespace {

struct WriteArgs {
  Job job;
  int rank;
  const Round* round;
  int32_t* input;
};
__global__ void Write(const __grid_constant__ WriteArgs args) {
  const int64_t count = args.job.input_count();
  for (int64_t i = threadIdx.x; i < count; i += blockDim.x) {
    args.input[i] = Value(args.round->number, args.rank, i);
  }
}

struct CheckArgs {
  Job job;
  int rank;
  Round* round;
  int32_t* output;
};
__global__ void Check(const __grid_constant__ CheckArgs args) {
  const int64_t count = args.job.output_count();
  bool wrong = false;
  for (int64_t i = threadIdx.x; i < count; i += blockDim.x) {
    wrong = wrong || args.output[i] != args.job.Expected(args.round->number, args.rank, i);
    args.output[i] = -1;
  }
  wrong = __syncthreads_or(wrong);
  if (threadIdx.x != 0) return;
  if (wrong && args.round->num_wrong++ == 0) args.round->first_wrong = args.round->number;
  ++args.round->number;
}

}  // namespace

void WriteInput(const Job& job, int rank, const Round* round, int32_t* input, cudaStream_t stream) {
  jcoll::gpu::LaunchOn(stream, 1, Write, WriteArgs{job, rank, round, input});
}

void CheckOutput(const Job& job, int rank, Round* round, int32_t* output, cudaStream_t stream) {
  jcoll::gpu::LaunchOn(stream, 1, Check, CheckArgs{job, rank, round, output});
}

}  // namespace rounds
