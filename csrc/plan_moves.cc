#include "plan_moves.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "plan_order.h"

namespace jcoll {
namespace {

// Turns transfers, in an order in which they can happen, into operations on values.
class Writer {
 public:
  explicit Writer(const Plan& plan) : plan_(plan), values_(plan) {}

  std::optional<Failure> Sends(const PlanStep&) { return std::nullopt; }

  std::optional<Failure> Receives(const PlanStep& s, const PlanStep& sent) {
    for (int k = 0; k < s.count; ++k) {
      std::vector<ChunkRef> srcs;
      if (s.kind == StepKind::kRecvReduce) {
        srcs.push_back({s.rank, s.src_buffer, s.src_chunk + k});
      }
      srcs.push_back({sent.rank, sent.src_buffer, sent.src_chunk + k});
      const ChunkRef dst{s.rank, s.dst_buffer, s.dst_chunk + k};
      if (auto failure = Write(dst, srcs)) return failure;
    }
    return std::nullopt;
  }

  std::optional<Failure> Local(const PlanStep& s) {
    for (int k = 0; k < s.count; ++k) {
      const ChunkRef dst{s.rank, s.dst_buffer, s.dst_chunk + k};
      std::vector<ChunkRef> srcs;
      if (s.kind == StepKind::kReduce) srcs.push_back(dst);
      srcs.push_back({s.rank, s.src_buffer, s.src_chunk + k});
      if (auto failure = Write(dst, srcs)) return failure;
    }
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
    out->rereads |= !m.is_last;
    out->fans_out |= m.num_dsts > 1;
    out->moves.push_back(m);
  }

  static Failure Bad(const ChunkRef& c, const std::string& what) {
    return CannotBeRun(c.rank, c.buffer, c.chunk, what);
  }

  const Plan& plan_;
  PlanValues values_;
};

}  // namespace

std::optional<Failure> MakeMoves(const Plan& plan, PlanMoves* moves, bool simplify) {
  PlanMoves m;
  static_cast<PlanShape&>(m) = plan.shape();
  Writer writer(plan);
  if (auto failure = PlanOrder<Writer>(plan, &writer).Run()) return failure;
  writer.Finish(simplify, &m);
  *moves = std::move(m);
  return std::nullopt;
}

}  // namespace jcoll
