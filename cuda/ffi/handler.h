// The one FFI handler of the CUDA runtime, "jcoll_cuda_collective", for platform "CUDA".
//
//   operands: the array; for ragged_all_to_all then output, input_offsets, send_sizes,
//             output_offsets, recv_sizes, as jax.lax.ragged_all_to_all takes them
//   results:  the array
//   attributes:
//     op                str      all_reduce, reduce_scatter, all_gather, all_to_all,
//                                ragged_all_to_all, broadcast, barrier; by plans also
//                                reduce, gather, scatter
//     algorithm         str      "direct": what serves best here; "one_shot", "two_shot",
//                                "multimem": that kernel or an error; "nccl": NCCL's
//                                function; else a plan's name
//     plan_op           str      the op that the plan is for; "" if the algorithm is not a plan
//     axis, call_site, signature  str, for people
//     dtype             str      numpy's name
//     reduce_op         str      sum, mean, min, max, prod; "" if the op does not reduce
//     timeout_s         f64      of one wait for a peer; <= 0: the process-wide default
//     count             i64      Call::count: elements of the whole array (all_reduce, broadcast,
//                                barrier) or of one block (reduce_scatter: the output, all_gather:
//                                the input, all_to_all: for one peer); ragged_all_to_all: not used
//     root              i64      a rank of the group; -1 if the op has none
//     groups            i64[]    logical device ids (the place in XLA's device assignment), one
//                                group after the other; a rank is the place in its group
//     group_size        i64
//     communication_id  i64      >= 2
//     row_nbytes, updates_per_rank, input_rows, output_rows
//                       i64      of ragged_all_to_all; absent for others
//
// XLA's FFI needs the extension "Collectives" 0.1 (jaxlib 0.11.2) for communicators, and 0.2
// (jaxlib 0.12) for windows. cmake/JcollCudaFfi.cmake says against which headers to build.
#pragma once

#include <string>
#include <vector>

namespace jcoll::gpu {

// Stage functions have the type XLA_FFI_Error*(XLA_FFI_CallFrame*).
struct FfiTarget {
  std::string name;
  void* instantiate;
  void* prepare;
  void* initialize;
  void* execute;
};

std::vector<FfiTarget> FfiTargets();

}  // namespace jcoll::gpu
