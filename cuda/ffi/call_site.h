// One collective instruction of a compiled program, as the custom call's attributes say: fixed at
// compile time and the same on all ranks. handler.h lists the attributes.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "csrc/failure.h"
#include "cuda/kernels/launch.h"
#include "cuda/kernels/plan_program.h"

namespace jcoll::gpu {

enum class Op {
  kAllReduce,
  kReduceScatter,
  kAllGather,
  kAllToAll,
  kRaggedAllToAll,
  kBroadcast,
  kBarrier,
  kReduce,  // These only by plans.
  kGather,
  kScatter,
};

// An operand or a result of a call, in device memory.
struct BufferView {
  void* data = nullptr;
  int64_t nbytes = 0;
  int64_t element_nbytes = 1;
};

struct Buffers {
  std::vector<BufferView> inputs, outputs;
};

struct CallSite {
  // The attributes as they came.
  std::string op_name, algorithm, axis, call_site, signature, dtype_name, reduce_op_name, plan_op;
  double timeout_s = 0;  // <= 0: the default.
  int64_t count = 0;
  int64_t root = -1;
  std::vector<int64_t> groups;  // Flat: one group of group_size ids after the other.
  int64_t group_size = 1;
  int64_t communication_id = 0;
  int64_t row_nbytes = 0, updates_per_rank = 1, input_rows = 0, output_rows = 0;

  // What follows from them; see Resolve.
  Op op = Op::kBarrier;
  DType dtype = DType::kU8;  // Types that only move and have no name here travel as bytes.
  ReduceOp reduce_op = ReduceOp::kNone;
  uint32_t op_id = 0;                       // Of this process: ErrorRecord::op_id.
  std::shared_ptr<const PlanProgram> plan;  // Null if the algorithm is no plan.
  uint64_t plan_hash = 0;                   // Of all that ranks must have in common of it.

  // Fills in the latter, and fails if the attributes do not fit together.
  std::optional<Failure> Resolve();

  // Fails if the buffers of a call are not those that the attributes describe.
  std::optional<Failure> CheckBuffers(const Buffers& buffers) const;
  int num_inputs() const { return op == Op::kRaggedAllToAll ? 6 : 1; }
  int64_t input_nbytes() const;
  int64_t output_nbytes() const;
  // Nothing moves, and nobody waits: no rank does anything.
  bool is_empty() const;
  // By NCCL's function and nothing else, so that ranks need not reach each other's memory.
  bool is_by_nccl() const { return algorithm == "nccl"; }

  // For a kernel; who takes part, and where the buffers are, is to be filled in.
  Call ToCall() const;

  int num_groups() const { return static_cast<int>(groups.size() / group_size); }
  double timeout_seconds() const;
  // What all ranks must agree on, hashed; the same in every process.
  uint64_t Fingerprint() const;

  // Where and what, the first part of every error:
  // "jcoll.all_reduce over axis 'x' (float32[8], direct) called at train.py:42".
  std::string Where() const;
  Failure Error(const std::string& problem, const std::string& remedy) const;

 private:
  std::optional<Failure> LoadPlan();
  std::optional<Failure> CheckRows(const Buffers& buffers) const;
};

// The timeout of calls that name none, in seconds; at first 300.
void SetDefaultTimeout(double seconds);

// CallSite::Where of an op_id. Sites are numbered as they are instantiated, and never forgotten: a
// kernel that gave up may be the last that a program does.
std::string WhereOf(uint32_t op_id);

}  // namespace jcoll::gpu
