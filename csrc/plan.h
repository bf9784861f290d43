// A plan: the finished program of one collective for all ranks, as jcoll/plan/ir.py describes it
// and jcoll/plan/encode.py writes it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "failure.h"

namespace jcoll {

// Numbers are part of the encoding.
enum class PlanOp : int32_t {
  kAllReduce,
  kReduceScatter,
  kAllGather,
  kAllToAll,
  kBroadcast,
  kReduce,
  kGather,
  kScatter,
};
enum class PlanBuffer : int32_t { kInput, kOutput, kScratch };
enum class StepKind : int32_t { kSend, kRecv, kRecvReduce, kCopy, kReduce };

// One instruction of one rank; the fields as in the encoding.
struct PlanStep {
  int32_t rank;
  StepKind kind;
  int32_t peer;
  PlanBuffer src_buffer;
  int32_t src_chunk;
  PlanBuffer dst_buffer;
  int32_t dst_chunk;
  int32_t count;
};

// What every form of a plan says of its sizes.
struct PlanShape {
  int num_ranks = 1, chunks_per_block = 1, in_blocks = 1, out_blocks = 1, num_scratch = 0;
  bool reduces = false;
};

struct Plan {
  PlanOp op;
  std::string algorithm;
  int num_ranks = 1;
  int root = 0;
  int chunks_per_block = 1;
  int num_scratch = 0;
  std::vector<int32_t> first_step;  // Rank r's steps: first_step[r] to first_step[r + 1].
  std::vector<PlanStep> steps;

  int in_blocks() const;
  int out_blocks() const;
  // Chunks in a buffer of every rank.
  int num_chunks(PlanBuffer buffer) const;
  PlanShape shape() const;
};

// Reads an encoded plan and checks that every index is inside what it indexes. That the plan does
// what its op promises has been proved before it was encoded.
std::optional<Failure> DecodePlan(const void* data, int64_t nbytes, Plan* plan);

// A decoded plan that makes no sense when its steps are followed; and at which chunk.
Failure CannotBeRun(const std::string& why);
Failure CannotBeRun(int rank, PlanBuffer buffer, int chunk, const std::string& what);

}  // namespace jcoll
