// Calls in rounds: what every rank's input is in a round, and what its output has to be, for the
// tests in which inputs and outputs change hands from call to call as fast as the kernels allow.
#pragma once

#include "cuda/kernels/launch.h"

#ifdef __CUDACC__
#define JCOLL_HOST_DEVICE __host__ __device__
#else
#define JCOLL_HOST_DEVICE
#endif

namespace rounds {

using jcoll::gpu::Kernel;

// The value of element i of rank r's input in round `round`.
JCOLL_HOST_DEVICE inline int32_t Value(int round, int rank, int64_t i) {
  return static_cast<int32_t>(static_cast<uint32_t>(round) * 1000003u +
                              static_cast<uint32_t>(rank) * 7919u + static_cast<uint32_t>(i) * 31u);
}

// A call of int32. A plan's is an all_reduce.
struct Job {
  Kernel kernel;
  int num_ranks;
  int root;
  int64_t count;

  JCOLL_HOST_DEVICE bool IsAllToAll() const {
    return kernel == Kernel::kAllToAll || kernel == Kernel::kRaggedAllToAll;
  }
  JCOLL_HOST_DEVICE int64_t input_count() const {
    return count * (kernel == Kernel::kReduceScatter || IsAllToAll() ? num_ranks : 1);
  }
  JCOLL_HOST_DEVICE int64_t output_count() const {
    return count * (kernel == Kernel::kAllGather || IsAllToAll() ? num_ranks : 1);
  }
  // Element i of rank r's output.
  JCOLL_HOST_DEVICE int32_t Expected(int round, int rank, int64_t i) const {
    if (kernel == Kernel::kBroadcast) return Value(round, root, i);
    const int source = static_cast<int>(i / count);
    if (kernel == Kernel::kAllGather) return Value(round, source, i % count);
    const int64_t own = rank * count;
    if (IsAllToAll()) return Value(round, source, own + i % count);
    uint32_t sum = 0;
    for (int p = 0; p < num_ranks; ++p) {
      sum += static_cast<uint32_t>(Value(round, p, kernel == Kernel::kReduceScatter ? own + i : i));
    }
    return static_cast<int32_t>(sum);
  }
};

// Of ragged_all_to_all, as all_to_all: rank r's row i for rank p. `arrays` has room for 3 numbers
// for each rank, and stays.
inline jcoll::gpu::RaggedRows EvenRows(const Job& job, int rank, int64_t* arrays) {
  const int n = job.num_ranks;
  for (int p = 0; p < n; ++p) {
    arrays[p] = p * job.count;
    arrays[n + p] = job.count;
    arrays[2 * n + p] = rank * job.count;
  }
  jcoll::gpu::RaggedRows rows;
  rows.input_offsets = arrays;
  rows.send_sizes = arrays + n;
  rows.output_offsets = arrays + 2 * n;
  rows.is_int64 = true;
  rows.row_nbytes = 4;
  rows.input_rows = rows.output_rows = n * job.count;
  return rows;
}

// ---- In stream order; see rounds.cu. The number of the round is in the device's memory, so that a
// CUDA graph may repeat the launches.

struct Round {
  int32_t number;
  int32_t num_wrong;    // Outputs with a wrong element, of all rounds,
  int32_t first_wrong;  // and the first of these rounds.
};

void WriteInput(const Job& job, int rank, const Round* round, int32_t* input, cudaStream_t stream);
// Overwrites the output afterwards, and goes on to the next round.
void CheckOutput(const Job& job, int rank, Round* round, int32_t* output, cudaStream_t stream);

}  // namespace rounds
