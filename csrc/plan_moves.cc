#include "plan_moves.h"

#include <algorithm>
#include <deque>
#include <map>
#include <string>
#include <utility>

namespace jcoll {
namespace {

constexpr int32_t kNone = -1;

// Turns transfers, in an order in which they can happen, into operations on values.
class Writer {
 public:
  explicit Writer(const Plan& plan) : plan_(plan), values_(plan) {}

  std::optional<Failure> Write(const ChunkRef& dst, const std::vector<ChunkRef>& srcs) {
    std::vector<PlanValues::Id> ids;
    for (const ChunkRef& src : srcs) {
      ids.push_back(values_.At(src));
      if (ids.back() == PlanValues::kNone) return Bad(src, "is read before it is written");
    }
    const int32_t part = values_.value(ids[0]).part;
    const bool has_home = dst.buffer != PlanBuffer::kScratch;
    if (has_home && dst.chunk % plan_.chunks_per_block != part) {
      return Bad(dst, "is written with a chunk of another length");
    }
    values_.Write(dst, part, std::move(ids));
    return std::nullopt;
  }

  void Finish(bool simplify, PlanMoves* out) {
    ZeroWhatIsMissing();
    if (simplify) values_.Simplify();
    for (const PlanValues::Operation& op : values_.operations()) {
      if (!op.dsts.empty()) Append(op, out);
    }
  }

 private:
  // Ranks that receive nothing (all but the root of reduce and gather) return zeros.
  void ZeroWhatIsMissing() {
    for (int32_t rank = 0; rank < plan_.num_ranks; ++rank) {
      for (int32_t c = 0; c < plan_.num_chunks(PlanBuffer::kOutput); ++c) {
        const ChunkRef place{rank, PlanBuffer::kOutput, c};
        if (values_.At(place) != PlanValues::kNone) continue;
        values_.Write(place, c % plan_.chunks_per_block, {});
      }
    }
  }

  void Append(const PlanValues::Operation& op, PlanMoves* out) {
    PlanMoves::Move m;
    m.part = values_.value(op.dsts[0]).part;
    m.first_src = static_cast<int32_t>(out->srcs.size());
    m.num_srcs = static_cast<int32_t>(op.srcs.size());
    m.first_dst = static_cast<int32_t>(out->dsts.size());
    m.num_dsts = static_cast<int32_t>(op.dsts.size());
    m.is_last = std::all_of(op.dsts.begin(), op.dsts.end(),
                            [this](PlanValues::Id id) { return values_.IsUnread(id); });
    for (PlanValues::Id id : op.srcs) out->srcs.push_back(values_.value(id).place);
    for (PlanValues::Id id : op.dsts) out->dsts.push_back(values_.value(id).place);
    std::stable_sort(out->srcs.begin() + m.first_src, out->srcs.end(),
                     [](const ChunkRef& a, const ChunkRef& b) { return a.rank < b.rank; });
    out->moves.push_back(m);
  }

  static Failure Bad(const ChunkRef& c, const std::string& what) {
    static constexpr const char* kNames[] = {"input", "output", "scratch"};
    return {FailureCode::kInvalidArgument, "jcoll: a plan cannot be run: rank " +
                                               std::to_string(c.rank) + "'s " +
                                               kNames[static_cast<int>(c.buffer)] + "[" +
                                               std::to_string(c.chunk) + "] " + what + "."};
  }

  const Plan& plan_;
  PlanValues values_;
};

// Runs the ranks' steps in turn, each as far as it gets.
class Sequencer {
 public:
  explicit Sequencer(const Plan& plan)
      : plan_(plan),
        next_(plan.first_step.begin(), plan.first_step.end() - 1),
        writer_(plan),
        waiting_(plan.num_ranks, kNone) {}

  std::optional<Failure> Run(bool simplify, PlanMoves* out) {
    std::deque<int> ready;
    for (int rank = 0; rank < plan_.num_ranks; ++rank) ready.push_back(rank);
    while (!ready.empty()) {
      const int rank = ready.front();
      ready.pop_front();
      if (auto failure = RunRank(rank, &ready)) return failure;
    }
    for (int rank = 0; rank < plan_.num_ranks; ++rank) {
      if (waiting_[rank] == kNone) continue;
      return Failure{FailureCode::kInvalidArgument,
                     "jcoll: a plan cannot be run: rank " + std::to_string(rank) +
                         " waits for a message from rank " + std::to_string(waiting_[rank]) +
                         " that is never sent."};
    }
    writer_.Finish(simplify, out);
    return std::nullopt;
  }

 private:
  using Connection = std::pair<int, int>;  // (sender, receiver)

  std::optional<Failure> RunRank(int rank, std::deque<int>* ready) {
    for (int& i = next_[rank]; i < plan_.first_step[rank + 1]; ++i) {
      const PlanStep& s = plan_.steps[i];
      if (s.kind == StepKind::kSend) {
        messages_[{rank, s.peer}].push_back(&s);
        if (waiting_[s.peer] != rank) continue;
        waiting_[s.peer] = kNone;
        ready->push_back(s.peer);
      } else if (s.kind == StepKind::kRecv || s.kind == StepKind::kRecvReduce) {
        auto& queue = messages_[{s.peer, rank}];
        if (queue.empty()) {
          waiting_[rank] = s.peer;
          return std::nullopt;
        }
        const PlanStep& sent = *queue.front();
        queue.pop_front();
        if (auto failure = Receive(s, sent)) return failure;
      } else if (auto failure = Local(s)) {
        return failure;
      }
    }
    return std::nullopt;
  }

  std::optional<Failure> Receive(const PlanStep& s, const PlanStep& sent) {
    if (s.count != sent.count) {
      return Failure{FailureCode::kInvalidArgument,
                     "jcoll: a plan cannot be run: rank " + std::to_string(sent.rank) + " sends " +
                         std::to_string(sent.count) + " chunks where rank " +
                         std::to_string(s.rank) + " receives " + std::to_string(s.count) + "."};
    }
    for (int k = 0; k < s.count; ++k) {
      std::vector<ChunkRef> srcs;
      if (s.kind == StepKind::kRecvReduce) {
        srcs.push_back({s.rank, s.src_buffer, s.src_chunk + k});
      }
      srcs.push_back({sent.rank, sent.src_buffer, sent.src_chunk + k});
      const ChunkRef dst{s.rank, s.dst_buffer, s.dst_chunk + k};
      if (auto failure = writer_.Write(dst, srcs)) return failure;
    }
    return std::nullopt;
  }

  std::optional<Failure> Local(const PlanStep& s) {
    for (int k = 0; k < s.count; ++k) {
      const ChunkRef dst{s.rank, s.dst_buffer, s.dst_chunk + k};
      std::vector<ChunkRef> srcs;
      if (s.kind == StepKind::kReduce) srcs.push_back(dst);
      srcs.push_back({s.rank, s.src_buffer, s.src_chunk + k});
      if (auto failure = writer_.Write(dst, srcs)) return failure;
    }
    return std::nullopt;
  }

  const Plan& plan_;
  std::vector<int> next_;
  Writer writer_;
  std::vector<int> waiting_;  // For a message from whom, or kNone.
  std::map<Connection, std::deque<const PlanStep*>> messages_;
};

}  // namespace

std::optional<Failure> MakeMoves(const Plan& plan, PlanMoves* moves, bool simplify) {
  PlanMoves m;
  m.op = plan.op;
  m.num_ranks = plan.num_ranks;
  m.chunks_per_block = plan.chunks_per_block;
  m.in_blocks = plan.in_blocks();
  m.out_blocks = plan.out_blocks();
  m.num_scratch = plan.num_scratch;
  m.reduces = plan.reduces();
  if (auto failure = Sequencer(plan).Run(simplify, &m)) return failure;
  *moves = std::move(m);
  return std::nullopt;
}

}  // namespace jcoll
