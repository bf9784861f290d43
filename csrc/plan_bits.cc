#include "plan_bits.h"

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

namespace jcoll {
namespace {

using Number = int32_t;
constexpr Number kNothing = -1;  // Not there yet, or zeros.

// What the chunks of all ranks hold.
class Numbers {
 public:
  explicit Numbers(const Plan& plan) : plan_(plan) {
    for (int b = 0; b < 3; ++b) {
      base_[b] = stride_;
      stride_ += plan.num_chunks(static_cast<PlanBuffer>(b));
    }
    chunks_.assign(static_cast<size_t>(stride_) * plan.num_ranks, kNothing);
    for (int32_t rank = 0; rank < plan.num_ranks; ++rank) {
      for (int32_t c = 0; c < plan.num_chunks(PlanBuffer::kInput); ++c) {
        At({rank, PlanBuffer::kInput, c}) = next_++;
      }
    }
  }

  Number& At(const ChunkRef& c) {
    return chunks_[static_cast<size_t>(c.rank) * stride_ + base_[static_cast<int>(c.buffer)] +
                   c.chunk];
  }

  // Of operands in the order in which they are added; the first two commute.
  Number Reduced(std::vector<Number> operands) {
    if (operands.empty()) return kNothing;
    if (operands.size() == 1) return operands[0];
    if (operands[1] < operands[0]) std::swap(operands[0], operands[1]);
    const auto [found, is_new] = reductions_.emplace(std::move(operands), next_);
    if (is_new) ++next_;
    return found->second;
  }

  std::optional<ChunkRef> Differing() {
    for (int32_t c = 0; c < plan_.num_chunks(PlanBuffer::kOutput); ++c) {
      for (int32_t rank = 1; rank < plan_.num_ranks; ++rank) {
        const ChunkRef chunk{rank, PlanBuffer::kOutput, c};
        if (At(chunk) != At({0, PlanBuffer::kOutput, c})) return chunk;
      }
    }
    return std::nullopt;
  }

 private:
  const Plan& plan_;
  int base_[3] = {}, stride_ = 0;
  std::vector<Number> chunks_;
  std::map<std::vector<Number>, Number> reductions_;
  Number next_ = 0;
};

// The programs of all ranks, each as far as it gets until all are done.
class Follower {
 public:
  Follower(const Plan& plan, const PlanPrograms& programs) : programs_(programs), numbers_(plan) {
    next_.resize(programs.num_ranks);
    for (const RankProgram& p : programs.ranks) slots_.emplace_back(p.num_slots, kNothing);
  }

  std::optional<ChunkRef> Run() {
    for (bool moves = true; moves;) {
      moves = false;
      for (int rank = 0; rank < programs_.num_ranks; ++rank) {
        while (Advance(rank)) moves = true;
      }
    }
    return numbers_.Differing();
  }

 private:
  bool Advance(int rank) {
    const std::vector<RankProgram::Action>& actions = programs_.ranks[rank].actions;
    if (next_[rank] == actions.size()) return false;
    const RankProgram::Action& action = actions[next_[rank]];
    std::vector<Number> operands;
    for (const RankProgram::Operand& src : action.srcs) {
      const bool is_here = src.slot == RankProgram::kNone;
      operands.push_back(is_here ? numbers_.At({src.rank, src.buffer, src.chunk})
                                 : slots_[src.rank][src.slot]);
      if (!is_here && operands.back() == kNothing) return false;
    }
    const Number number = numbers_.Reduced(std::move(operands));
    if (action.slot != RankProgram::kNone) slots_[rank][action.slot] = number;
    if (action.has_chunk) numbers_.At({rank, action.buffer, action.chunk}) = number;
    ++next_[rank];
    return true;
  }

  const PlanPrograms& programs_;
  Numbers numbers_;
  std::vector<size_t> next_;                // By rank: its next action.
  std::vector<std::vector<Number>> slots_;  // By rank and slot; each is written once.
};

}  // namespace

std::optional<ChunkRef> DifferingBits(const Plan& plan, const PlanMoves& moves) {
  if (plan.op != PlanOp::kAllReduce) return std::nullopt;
  Numbers numbers(plan);
  for (const PlanMoves::Move& m : moves.moves) {
    std::vector<Number> operands;
    for (int i = 0; i < m.num_srcs; ++i)
      operands.push_back(numbers.At(moves.srcs[m.first_src + i]));
    const Number number = numbers.Reduced(std::move(operands));
    for (int i = 0; i < m.num_dsts; ++i) numbers.At(moves.dsts[m.first_dst + i]) = number;
  }
  return numbers.Differing();
}

std::optional<ChunkRef> DifferingBits(const Plan& plan, const PlanPrograms& programs) {
  if (plan.op != PlanOp::kAllReduce) return std::nullopt;
  return Follower(plan, programs).Run();
}

}  // namespace jcoll
