// Between launch.cc and the files of kernels: what every kernel is given, and one function per
// kernel.
#pragma once

#include "cuda/kernels/launch.h"
#include "cuda/kernels/plan_program.h"

namespace jcoll::gpu {

// What a failed call leaves in its output instead of a result that looks right: the pattern, whose
// length divides 8 bytes, over and over.
struct Poison {
  void* output = nullptr;
  int64_t nbytes = 0;
  uint64_t pattern = 0;
};

// A Call as the device needs it.
struct Args {
  PeerTable peers;
  Poison poison;
  int64_t count = 0;   // Elements, as in Call.
  int64_t nbytes = 0;  // The same in bytes.
  RaggedRows rows;
  PlanCode plan;
  PlanLanes plan_lanes;
  int32_t root = 0;
  int32_t divisor = 1;  // Of what has been summed: the number of ranks for a mean.
  uint32_t op_id = 0;
};

struct Task;

// Whether, and how, a rank's input and output may overlap.
enum class Overlap {
  kNone,
  kSame,     // They may be the same buffer.
  kOwnPart,  // The smaller one may be this rank's block of the larger one.
};

// What launch.cc and refusal.cc need to know about a kernel.
struct KernelFacts {
  const char* name;
  bool reduces;
  Overlap overlap;
  // Blocks of Call::count elements per rank in a rank's input and output: 1, or one for each rank.
  // A plan's program says it for itself, and whether it reduces.
  bool input_per_rank, output_per_rank;
  cudaError_t (*launch)(const Task&, cudaStream_t);
};
KernelFacts FactsOf(Kernel kernel);

int64_t InputNbytes(const Call& call);
int64_t OutputNbytes(const Call& call);

// A call that Refusal has let through, with its blocks set, and without complex numbers and bools:
// these are floats and bytes.
struct Task {
  Args args;
  DType dtype = DType::kF32;
  ReduceOp reduce_op = ReduceOp::kNone;
  int num_blocks = 1;
};

cudaError_t LaunchAllReduceOneShot(const Task& task, cudaStream_t stream);
cudaError_t LaunchAllReduceOneShotLL(const Task& task, cudaStream_t stream);
cudaError_t LaunchAllReduceTwoShot(const Task& task, cudaStream_t stream);
cudaError_t LaunchAllReduceMultimemOneShot(const Task& task, cudaStream_t stream);
cudaError_t LaunchAllReduceMultimemTwoShot(const Task& task, cudaStream_t stream);
cudaError_t LaunchReduceScatter(const Task& task, cudaStream_t stream);
cudaError_t LaunchAllGather(const Task& task, cudaStream_t stream);
cudaError_t LaunchAllToAll(const Task& task, cudaStream_t stream);
cudaError_t LaunchRaggedAllToAll(const Task& task, cudaStream_t stream);
cudaError_t LaunchBroadcast(const Task& task, cudaStream_t stream);
cudaError_t LaunchBarrier(const Task& task, cudaStream_t stream);
cudaError_t LaunchPlanSimple(const Task& task, cudaStream_t stream);
cudaError_t LaunchPlanLL(const Task& task, cudaStream_t stream);

}  // namespace jcoll::gpu
