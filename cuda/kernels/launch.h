// The kernels as the host sees them: a Call says what is to be done, Refusal whether a kernel
// serves it, Launch puts it on a stream. The CUDA build and the emulator implement the same
// functions.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "cuda/kernels/dtype.h"
#include "cuda/kernels/peer_table.h"
#include "cuda/runtime_api.h"  // cudaStream_t, cudaError_t: CUDA's, or the emulator's.

namespace jcoll::gpu {

// One per kernel file. The numbers are not stored anywhere.
enum class Kernel {
  kAllReduceOneShot,          // Every rank reads all inputs.
  kAllReduceOneShotLL,        // Every rank pushes its input as lines of data and flag; no barrier.
  kAllReduceTwoShot,          // The owner of a part reduces it and stores it to all peers' outputs.
  kAllReduceMultimemOneShot,  // The switch reduces (sm_90, NVLS).
  kAllReduceMultimemTwoShot,
  kReduceScatter,
  kAllGather,
  kAllToAll,
  kRaggedAllToAll,
  kBroadcast,
  kBarrier,
  kPlanSimple,  // The interpreter of plans: data, fence, counter.
  kPlanLL,      // The same by lines of data and flag.
};
const char* Name(Kernel kernel);

enum class ReduceOp { kNone, kSum, kMean, kMin, kMax, kProd };

// ragged_all_to_all as jax.lax defines it; device arrays of int32 or int64, [num_ranks] each (times
// `updates_per_rank`), in rows of `row_nbytes`. Rows nobody sends keep what the output has.
struct RaggedRows {
  const void* input_offsets = nullptr;
  const void* send_sizes = nullptr;
  const void* output_offsets = nullptr;  // Where in the receiver's output.
  bool is_int64 = false;
  int64_t updates_per_rank = 1;
  int64_t row_nbytes = 0;
  int64_t input_rows = 0, output_rows = 0;
};

struct PlanProgram;  // A plan made ready for the interpreters; see plan_program.h.

struct Call {
  Kernel kernel = Kernel::kBarrier;
  DType dtype = DType::kF32;
  ReduceOp reduce_op = ReduceOp::kNone;
  // Elements of one block: the whole array for all_reduce and broadcast; the shard of one rank for
  // reduce_scatter (output), all_gather (input) and all_to_all (per peer).
  int64_t count = 0;
  int32_t root = 0;
  uint32_t op_id = 0;  // Comes back in ErrorRecord.
  PeerTable peers;
  RaggedRows rows;
  const PlanProgram* program = nullptr;  // Of a plan; the same on all ranks.
  const void* program_image = nullptr;   // program->images[rank], in device memory.
  int num_blocks = 0;  // 0: BlocksFor(call, DeviceFacts{}). The same on all ranks.
};

// What the device has; by default, what the smallest GPU with NVLink that we build for has: an
// A100.
struct DeviceFacts {
  int compute_capability = 80;  // 10 * major + minor.
  int num_sms = 108;
};

// Why a kernel cannot do a call; nothing if it can. Needs no GPU.
std::optional<std::string> Refusal(const Call& call, const DeviceFacts& device);
// Symmetric scratch that every rank must give for a call. The same on all ranks.
int64_t ScratchNbytes(const Call& call);
int BlocksFor(const Call& call, const DeviceFacts& device);
// Asynchronous. What goes wrong on the device is in *call.peers.error; the outputs of such a call
// are poisoned: NaN, or the type's largest value.
cudaError_t Launch(const Call& call, cudaStream_t stream);

}  // namespace jcoll::gpu
