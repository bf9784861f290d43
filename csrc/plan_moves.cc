#include "plan_moves.h"

#include <algorithm>
#include <deque>
#include <map>
#include <string>
#include <utility>

namespace jcoll {
namespace {

constexpr int32_t kNone = -1;

// A reduction in the making.
struct Draft {
  ChunkRef dst;
  int32_t part;
  std::vector<ChunkRef> srcs;
  bool joined = false;  // Its operands have become those of a later draft.
};

// What is known of a chunk of a rank.
struct Place {
  int32_t last_write = kNone, last_read = kNone;  // Drafts.
  int32_t part = kNone;                           // Of the value it holds.
};

// Turns transfers, in an order in which they can happen, into drafts.
class Writer {
 public:
  explicit Writer(const Plan& plan) : plan_(plan) {
    for (int b = 0; b < 3; ++b) {
      base_[b] = stride_;
      stride_ += plan.num_chunks(static_cast<PlanBuffer>(b));
    }
    places_.resize(static_cast<size_t>(stride_) * plan.num_ranks);
  }

  std::optional<Failure> Write(const ChunkRef& dst, std::vector<ChunkRef> srcs) {
    const int32_t part = PartOf(srcs[0]);
    if (part == kNone) return Bad(srcs[0], "is read before it is written");
    const bool has_home = dst.buffer != PlanBuffer::kScratch;
    if (plan_.chunks_per_block > 1 && has_home && dst.chunk % plan_.chunks_per_block != part) {
      return Bad(dst, "is written with a chunk of another length");
    }
    Join(dst, &srcs);
    const int32_t index = static_cast<int32_t>(drafts_.size());
    for (const ChunkRef& src : srcs) At(src).last_read = index;
    At(dst).last_write = index;
    At(dst).part = part;
    drafts_.push_back({dst, part, std::move(srcs)});
    return std::nullopt;
  }

  void Finish(PlanMoves* out) {
    ZeroWhatIsMissing();
    for (Draft& d : drafts_) {
      if (d.joined) continue;
      std::stable_sort(d.srcs.begin(), d.srcs.end(),
                       [](const ChunkRef& a, const ChunkRef& b) { return a.rank < b.rank; });
      out->moves.push_back({d.dst, d.part, static_cast<int32_t>(out->srcs.size()),
                            static_cast<int32_t>(d.srcs.size())});
      out->srcs.insert(out->srcs.end(), d.srcs.begin(), d.srcs.end());
    }
  }

 private:
  Place& At(const ChunkRef& c) {
    return places_[static_cast<size_t>(c.rank) * stride_ + base_[static_cast<int>(c.buffer)] +
                   c.chunk];
  }

  // The place in its block of the value that a chunk holds.
  int32_t PartOf(const ChunkRef& c) {
    if (c.buffer == PlanBuffer::kInput) return c.chunk % plan_.chunks_per_block;
    return At(c).part;
  }

  // If the first operand is the old value of dst, and has been computed for this alone, takes its
  // operands in its place. They must still be what they were.
  void Join(const ChunkRef& dst, std::vector<ChunkRef>* srcs) {
    if (srcs->size() < 2) return;
    const int32_t writer = At(dst).last_write;
    const ChunkRef& first = (*srcs)[0];
    if (writer == kNone || &At(first) != &At(dst) || At(dst).last_read > writer) return;
    Draft& old = drafts_[writer];
    for (const ChunkRef& src : old.srcs) {
      if (&At(src) != &At(dst) && At(src).last_write > writer) return;
    }
    old.joined = true;
    srcs->erase(srcs->begin());
    srcs->insert(srcs->begin(), old.srcs.begin(), old.srcs.end());
  }

  // Ranks that receive nothing (all but the root of reduce and gather) return zeros.
  void ZeroWhatIsMissing() {
    for (int32_t rank = 0; rank < plan_.num_ranks; ++rank) {
      for (int32_t c = 0; c < plan_.num_chunks(PlanBuffer::kOutput); ++c) {
        const ChunkRef dst{rank, PlanBuffer::kOutput, c};
        if (At(dst).last_write == kNone) drafts_.push_back({dst, c % plan_.chunks_per_block, {}});
      }
    }
  }

  static Failure Bad(const ChunkRef& c, const std::string& what) {
    static constexpr const char* kNames[] = {"input", "output", "scratch"};
    return {FailureCode::kInvalidArgument,
            "jcoll: a plan cannot be run: rank " + std::to_string(c.rank) + "'s " +
                kNames[static_cast<int>(c.buffer)] + "[" + std::to_string(c.chunk) + "] " + what +
                "."};
  }

  const Plan& plan_;
  int base_[3] = {}, stride_ = 0;
  std::vector<Place> places_;
  std::vector<Draft> drafts_;
};

// Runs the ranks' steps in turn, each as far as it gets.
class Sequencer {
 public:
  explicit Sequencer(const Plan& plan)
      : plan_(plan),
        next_(plan.first_step.begin(), plan.first_step.end() - 1),
        writer_(plan),
        waiting_(plan.num_ranks, kNone) {}

  std::optional<Failure> Run(PlanMoves* out) {
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
    writer_.Finish(out);
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
      if (auto failure = writer_.Write(dst, std::move(srcs))) return failure;
    }
    return std::nullopt;
  }

  std::optional<Failure> Local(const PlanStep& s) {
    for (int k = 0; k < s.count; ++k) {
      const ChunkRef dst{s.rank, s.dst_buffer, s.dst_chunk + k};
      std::vector<ChunkRef> srcs;
      if (s.kind == StepKind::kReduce) srcs.push_back(dst);
      srcs.push_back({s.rank, s.src_buffer, s.src_chunk + k});
      if (auto failure = writer_.Write(dst, std::move(srcs))) return failure;
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

std::optional<Failure> MakeMoves(const Plan& plan, PlanMoves* moves) {
  PlanMoves m;
  m.op = plan.op;
  m.num_ranks = plan.num_ranks;
  m.chunks_per_block = plan.chunks_per_block;
  m.in_blocks = plan.in_blocks();
  m.out_blocks = plan.out_blocks();
  m.num_scratch = plan.num_scratch;
  m.reduces = plan.reduces();
  if (auto failure = Sequencer(plan).Run(&m)) return failure;
  *moves = std::move(m);
  return std::nullopt;
}

}  // namespace jcoll
