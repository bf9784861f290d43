// barrier: no rank's stream goes on before all ranks' streams have come here.
//
// One barrier of data is enough: what any rank's program wrote before it can be read by all after
// it.
#include "cuda/kernels/signal.cuh"

namespace jcoll::gpu {
namespace {

__global__ void __launch_bounds__(kThreadsPerBlock, 1) Barrier(const __grid_constant__ Args args) {
  BlockSync sync(args.peers, args.op_id);
  sync.Barrier(Order::kData);
  sync.Leave(args.poison);
}

}  // namespace

cudaError_t LaunchBarrier(const Task& task, cudaStream_t stream) {
  return LaunchOn(stream, task.num_blocks, Barrier, task.args);
}

}  // namespace jcoll::gpu
