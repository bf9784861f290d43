// Plans for tests: those of tests/cuda/encode_plans.py, calls by them, and what they have to give.
#pragma once

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "csrc/chunk_cuts.h"
#include "csrc/plan.h"
#include "csrc/reduce.h"
#include "csrc/shm/program.h"
#include "cuda/kernels/plan_program.h"
#include "tests/cuda/elements.h"

namespace plans {

using elements::Bytes;
using elements::Random;
using jcoll::Plan;
using jcoll::PlanBuffer;
using jcoll::PlanOp;
using jcoll::PlanPrograms;
using jcoll::RankProgram;
using jcoll::gpu::PlanProgram;
using world::Buffers;
using world::Call;
using world::DType;
using world::Kernel;
using world::ReduceOp;
using world::World;

constexpr Kernel kProtocols[] = {Kernel::kPlanSimple, Kernel::kPlanLL};

struct Case {
  Plan plan;
  PlanPrograms programs;
  PlanProgram program;

  bool reduces() const {
    return plan.op == PlanOp::kAllReduce || plan.op == PlanOp::kReduceScatter ||
           plan.op == PlanOp::kReduce;
  }
  int64_t input_count(int64_t count) const { return plan.in_blocks() * count; }
  int64_t output_count(int64_t count) const { return plan.out_blocks() * count; }
  std::string name() const {
    return plan.algorithm + " op " + std::to_string(static_cast<int>(plan.op)) + " of " +
           std::to_string(plan.num_ranks) + " ranks, root " + std::to_string(plan.root);
  }

  Call MakeCall(Kernel kernel, DType dtype, ReduceOp reduce_op, int64_t count) const {
    Call call;
    call.kernel = kernel;
    call.dtype = dtype;
    call.reduce_op = reduces() ? reduce_op : ReduceOp::kNone;
    call.count = count;
    call.peers.num_ranks = plan.num_ranks;
    call.program = &program;
    call.num_blocks = 2;
    return call;
  }
};

// All of them, or none if the file cannot be read.
inline const std::vector<Case>& All() {
  static const std::vector<Case> all = [] {
    std::vector<Case> cases;
    std::ifstream file(JCOLL_PLANS_FILE, std::ios::binary);
    const std::string bytes((std::istreambuf_iterator<char>(file)), {});
    for (size_t at = 0; at < bytes.size();) {
      int32_t nbytes;
      std::memcpy(&nbytes, bytes.data() + at, sizeof(nbytes));
      at += sizeof(nbytes);
      Case& c = cases.emplace_back();
      EXPECT(!jcoll::DecodePlan(bytes.data() + at, nbytes, &c.plan));
      EXPECT(!jcoll::MakePrograms(c.plan, &c.programs));
      c.program = jcoll::gpu::CompilePlan(c.programs);
      at += static_cast<size_t>(nbytes);
    }
    EXPECT(cases.size() > 200);
    return cases;
  }();
  return all;
}

inline std::vector<const Case*> OfRanks(int num_ranks) {
  std::vector<const Case*> found;
  for (const Case& c : All()) {
    if (c.plan.num_ranks == num_ranks) found.push_back(&c);
  }
  return found;
}

inline const Case& Find(const std::string& algorithm, PlanOp op, int num_ranks) {
  for (const Case& c : All()) {
    if (c.plan.algorithm == algorithm && c.plan.op == op && c.plan.num_ranks == num_ranks) return c;
  }
  std::fprintf(stderr, "no plan %s\n", algorithm.c_str());
  std::abort();
}

// What the ranks' programs for CPUs come to, done one action at a time, by one thread: outputs by
// rank. This is what a plan's sums are on CPU between processes, to the last bit.
class OnOneThread {
 public:
  OnOneThread(const Case& c, DType dtype, ReduceOp reduce_op, int64_t count,
              const std::vector<Bytes>& inputs)
      : c_(c), element_nbytes_(Size(dtype)), inputs_(inputs) {
    block_nbytes_ = count * element_nbytes_;
    cuts_ = jcoll::ChunkCuts(block_nbytes_, element_nbytes_, c.plan.chunks_per_block);
    if (c.reduces()) {
      reduce_ = jcoll::GetReduceFn(static_cast<jcoll::DType>(dtype), elements::OnCpu(reduce_op));
    }
    outputs_.assign(c.plan.num_ranks, Bytes(c.output_count(block_nbytes_)));
  }

  std::vector<Bytes> Run() {
    std::vector<size_t> next(c_.plan.num_ranks);
    for (bool moved = true; moved;) {
      moved = false;
      for (int r = 0; r < c_.plan.num_ranks; ++r) {
        const auto& actions = c_.programs.ranks[r].actions;
        while (next[r] < actions.size() && Do(r, actions[next[r]])) moved = ++next[r] > 0;
      }
    }
    for (int r = 0; r < c_.plan.num_ranks; ++r) {
      EXPECT_EQ(next[r], c_.programs.ranks[r].actions.size());
    }
    return std::move(outputs_);
  }

 private:
  using Key = std::pair<int, int>;  // Of a rank, its slot or chunk of SCRATCH.

  // False if an operand has not been sent yet.
  bool Do(int rank, const RankProgram::Action& a) {
    const auto range = cuts_.Lane(a.part, 0, cuts_.chunk_nbytes());
    const auto size = static_cast<size_t>(range.nbytes());
    std::vector<const void*> srcs;
    for (const auto& src : a.srcs) {
      if (src.slot != RankProgram::kNone && !slots_.count({src.rank, src.slot})) return false;
      srcs.push_back(src.slot != RankProgram::kNone
                         ? slots_[{src.rank, src.slot}].data()
                         : At(rank, src.buffer, src.chunk, range.begin, size));
    }
    Bytes result(size);
    void* dst = result.data();
    if (size > 0) {
      jcoll::Transfer(srcs.data(), static_cast<int>(srcs.size()), &dst, 1, range.nbytes(), reduce_,
                      element_nbytes_, false);
    }
    if (a.has_chunk) {
      uint8_t* to = At(rank, a.buffer, a.chunk, range.begin, size);
      std::copy(result.begin(), result.end(), to);
    }
    if (a.slot != RankProgram::kNone) slots_[{rank, a.slot}] = std::move(result);
    return true;
  }

  uint8_t* At(int rank, PlanBuffer buffer, int chunk, int64_t begin, size_t size) {
    if (buffer == PlanBuffer::kInput) {
      return const_cast<uint8_t*>(inputs_[rank].data()) + cuts_.Offset(chunk, begin);
    }
    if (buffer == PlanBuffer::kOutput) return outputs_[rank].data() + cuts_.Offset(chunk, begin);
    Bytes& scratch = scratch_[{rank, chunk}];
    scratch.resize(std::max(scratch.size(), size));
    return scratch.data();
  }

  const Case& c_;
  const int64_t element_nbytes_;
  const std::vector<Bytes>& inputs_;
  int64_t block_nbytes_;
  jcoll::ChunkCuts cuts_;
  jcoll::ReduceFn reduce_ = nullptr;
  std::vector<Bytes> outputs_;
  std::map<Key, Bytes> slots_, scratch_;
};

}  // namespace plans
