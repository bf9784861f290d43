#include "program.h"

#include <algorithm>
#include <cstddef>
#include <deque>
#include <map>
#include <string>
#include <utility>

#include "../plan_order.h"

namespace jcoll {
namespace {

constexpr int32_t kNone = RankProgram::kNone;
using Action = RankProgram::Action;
using Operand = RankProgram::Operand;

// What is known of a chunk of a rank.
struct Place {
  int32_t writer = kNone;  // The action that made what it holds; none for INPUT.
  int32_t slot = kNone;    // Where that has been staged.
  int32_t part = kNone;
  int32_t last_read = kNone;
};

// Writes the program of one rank, step by step.
class RankWriter {
 public:
  RankWriter(const Plan& plan, int rank, RankProgram* program)
      : plan_(plan), rank_(rank), program_(program) {
    for (int b = 0; b < 3; ++b) {
      base_[b] = static_cast<int>(places_.size());
      places_.resize(places_.size() + plan.num_chunks(static_cast<PlanBuffer>(b)));
    }
    for (int c = 0; c < plan.num_chunks(PlanBuffer::kInput); ++c) {
      At(PlanBuffer::kInput, c).part = c % plan.chunks_per_block;
    }
  }

  struct Message {
    int32_t index;
    std::vector<int32_t> slots, parts;  // By chunk of the step.
  };

  std::optional<Failure> Send(const PlanStep& s, Message* message) {
    message->index = program_->num_messages++;
    for (int k = 0; k < s.count; ++k) {
      Place& place = At(s.src_buffer, s.src_chunk + k);
      if (place.part == kNone)
        return Bad(s.src_buffer, s.src_chunk + k, "is sent before it is written");
      if (place.slot == kNone) Stage(s.src_buffer, s.src_chunk + k);
      message->slots.push_back(place.slot);
      message->parts.push_back(place.part);
    }
    if (program_->actions.empty()) program_->actions.emplace_back();
    ++program_->actions.back().num_posts;
    auto& receivers = program_->receivers;
    if (std::find(receivers.begin(), receivers.end(), s.peer) == receivers.end()) {
      receivers.push_back(s.peer);
    }
    return std::nullopt;
  }

  std::optional<Failure> Receive(const PlanStep& s, const Message& message) {
    for (int k = 0; k < s.count; ++k) {
      Action action;
      if (s.kind == StepKind::kRecvReduce) {
        if (auto failure = AddLocal(s.src_buffer, s.src_chunk + k, &action)) return failure;
      }
      action.srcs.push_back({s.peer, message.slots[k], PlanBuffer::kInput, 0, message.index});
      action.part = message.parts[k];
      if (auto failure = Write(s.dst_buffer, s.dst_chunk + k, std::move(action))) return failure;
    }
    return std::nullopt;
  }

  std::optional<Failure> Local(const PlanStep& s) {
    for (int k = 0; k < s.count; ++k) {
      Action action;
      if (s.kind == StepKind::kReduce) {
        if (auto failure = AddLocal(s.dst_buffer, s.dst_chunk + k, &action)) return failure;
      }
      if (auto failure = AddLocal(s.src_buffer, s.src_chunk + k, &action)) return failure;
      action.part = At(s.src_buffer, s.src_chunk + k).part;
      if (auto failure = Write(s.dst_buffer, s.dst_chunk + k, std::move(action))) return failure;
    }
    return std::nullopt;
  }

  // Ranks that receive nothing (all but the root of reduce and gather) return zeros.
  void Finish() {
    for (int c = 0; c < plan_.num_chunks(PlanBuffer::kOutput); ++c) {
      if (At(PlanBuffer::kOutput, c).part != kNone) continue;
      Action action;
      action.has_chunk = true;
      action.chunk = c;
      action.part = c % plan_.chunks_per_block;
      program_->actions.push_back(std::move(action));
    }
    for (Action& a : program_->actions) {
      std::stable_sort(a.srcs.begin(), a.srcs.end(),
                       [](const Operand& x, const Operand& y) { return x.rank < y.rank; });
    }
  }

 private:
  Place& At(PlanBuffer buffer, int chunk) {
    return places_[base_[static_cast<int>(buffer)] + chunk];
  }

  // Has a value staged: by what makes it, if that is one of our actions, else by a copy.
  void Stage(PlanBuffer buffer, int chunk) {
    Place& place = At(buffer, chunk);
    place.slot = program_->num_slots++;
    program_->origins.emplace_back();
    if (buffer != PlanBuffer::kScratch) program_->origins.back() = {buffer, chunk};
    if (place.writer != kNone) {
      program_->actions[place.writer].slot = place.slot;
      // It is looked at now: a later reduction must not take its operands away.
      place.last_read = static_cast<int32_t>(program_->actions.size());
      return;
    }
    Action copy;
    copy.srcs.push_back({rank_, kNone, buffer, chunk, kNone});
    copy.slot = place.slot;
    copy.part = place.part;
    program_->actions.push_back(std::move(copy));
  }

  std::optional<Failure> AddLocal(PlanBuffer buffer, int chunk, Action* action) {
    if (At(buffer, chunk).part == kNone) return Bad(buffer, chunk, "is read before it is written");
    action->srcs.push_back({rank_, kNone, buffer, chunk, kNone});
    return std::nullopt;
  }

  std::optional<Failure> Write(PlanBuffer buffer, int chunk, Action action) {
    if (buffer != PlanBuffer::kScratch && chunk % plan_.chunks_per_block != action.part) {
      return Bad(buffer, chunk, "is written with a chunk of another length");
    }
    Place& place = At(buffer, chunk);
    if (place.slot != kNone) program_->origins[place.slot].reset();
    TakeOver(place, buffer, chunk, &action);
    const int32_t index = static_cast<int32_t>(program_->actions.size());
    for (const Operand& src : action.srcs) {
      if (src.slot == kNone) At(src.buffer, src.chunk).last_read = index;
    }
    action.has_chunk = true;
    action.buffer = buffer;
    action.chunk = chunk;
    const int32_t part = action.part;
    program_->actions.push_back(std::move(action));
    place = {index, kNone, part, place.last_read};
    return std::nullopt;
  }

  // Where the old value of the chunk is an operand, was made by a reduction or copy for this alone,
  // and its own operands still are what they were, these take its place.
  void TakeOver(const Place& place, PlanBuffer buffer, int chunk, Action* action) {
    if (action->srcs.size() < 2 || place.writer == kNone || place.slot != kNone) return;
    const Operand& first = action->srcs[0];
    if (first.slot != kNone || first.buffer != buffer || first.chunk != chunk) return;
    Action& old = program_->actions[place.writer];
    if (place.last_read > place.writer) return;
    for (const Operand& src : old.srcs) {
      if (src.slot != kNone) continue;
      const bool is_itself = src.buffer == buffer && src.chunk == chunk;
      if (!is_itself && At(src.buffer, src.chunk).writer > place.writer) return;
    }
    std::vector<Operand> srcs = std::move(old.srcs);
    srcs.insert(srcs.end(), action->srcs.begin() + 1, action->srcs.end());
    action->srcs = std::move(srcs);
    // What it posts stays in its place.
    const int32_t num_posts = old.num_posts;
    old = Action();
    old.num_posts = num_posts;
  }

  Failure Bad(PlanBuffer buffer, int chunk, const std::string& what) const {
    return CannotBeRun(rank_, buffer, chunk, what);
  }

  const Plan& plan_;
  const int rank_;
  RankProgram* const program_;
  int base_[3] = {};
  std::vector<Place> places_;
};

class Writer {
 public:
  Writer(const Plan& plan, PlanPrograms* out) {
    out->ranks.resize(plan.num_ranks);
    for (int rank = 0; rank < plan.num_ranks; ++rank) {
      ranks_.emplace_back(plan, rank, &out->ranks[rank]);
    }
  }
  std::optional<Failure> Sends(const PlanStep& s) {
    RankWriter::Message message;
    auto failure = ranks_[s.rank].Send(s, &message);
    messages_[&s] = std::move(message);
    return failure;
  }
  std::optional<Failure> Receives(const PlanStep& s, const PlanStep& sent) {
    auto failure = ranks_[s.rank].Receive(s, messages_[&sent]);
    messages_.erase(&sent);
    return failure;
  }
  std::optional<Failure> Local(const PlanStep& s) { return ranks_[s.rank].Local(s); }
  void Finish() {
    for (RankWriter& rank : ranks_) rank.Finish();
  }

 private:
  std::deque<RankWriter> ranks_;
  std::map<const PlanStep*, RankWriter::Message> messages_;
};

// The one-shot program of one rank, from what all ranks need.
class MapWriter {
 public:
  MapWriter(int num_ranks, int in_blocks, int out_blocks, const std::vector<int64_t>& map)
      : num_ranks_(num_ranks), in_blocks_(in_blocks), out_blocks_(out_blocks), map_(map) {}

  void Write(std::vector<RankProgram>* ranks) {
    for (int r = 0; r < num_ranks_; ++r) {
      for (int b = 0; b < out_blocks_; ++b) Need(r, map_[r * out_blocks_ + b], ranks);
    }
    for (int r = 0; r < num_ranks_; ++r) {
      WriteBlocks(r, &(*ranks)[r].actions);
    }
  }

 private:
  // First those blocks that need nothing of others, whose blocks may not be there yet.
  void WriteBlocks(int rank, std::vector<Action>* actions) {
    const auto num_staged = static_cast<std::ptrdiff_t>(actions->size());
    for (int b = 0; b < out_blocks_; ++b) {
      Action action;
      action.srcs = Sources(rank, map_[rank * out_blocks_ + b]);
      action.has_chunk = true;
      action.chunk = b;
      actions->push_back(std::move(action));
    }
    std::stable_partition(actions->begin() + num_staged, actions->end(), [](const Action& action) {
      return std::all_of(action.srcs.begin(), action.srcs.end(),
                         [](const Operand& src) { return src.slot == kNone; });
    });
  }

  void Need(int reader, int64_t source, std::vector<RankProgram>* ranks) {
    if (source >= 0) {
      Stage(reader, static_cast<int>(source / in_blocks_), static_cast<int>(source % in_blocks_),
            ranks);
    } else if (source <= -2) {
      for (int r = 0; r < num_ranks_; ++r) Stage(reader, r, static_cast<int>(-2 - source), ranks);
    }
  }

  void Stage(int reader, int rank, int block, std::vector<RankProgram>* ranks) {
    if (reader == rank) return;
    RankProgram& program = (*ranks)[rank];
    auto& receivers = program.receivers;
    if (std::find(receivers.begin(), receivers.end(), reader) == receivers.end()) {
      receivers.push_back(reader);
    }
    if (!slots_.emplace(std::make_pair(rank, block), program.num_slots).second) return;
    Action copy;
    copy.srcs.push_back({rank, kNone, PlanBuffer::kInput, block, kNone});
    copy.slot = program.num_slots++;
    program.origins.push_back(RankProgram::Origin{PlanBuffer::kInput, block});
    copy.num_posts = 1;
    ++program.num_messages;
    program.actions.push_back(std::move(copy));
  }

  std::vector<Operand> Sources(int reader, int64_t source) const {
    std::vector<Operand> srcs;
    const int first = source >= 0 ? static_cast<int>(source / in_blocks_) : 0;
    const int last = source >= 0 ? first : source <= -2 ? num_ranks_ - 1 : -1;
    const int block =
        source >= 0 ? static_cast<int>(source % in_blocks_) : static_cast<int>(-2 - source);
    for (int r = first; r <= last; ++r) {
      const int32_t slot = r == reader ? kNone : slots_.at({r, block});
      // A rank's message number i is in its slot number i.
      srcs.push_back({r, slot, PlanBuffer::kInput, block, slot});
    }
    return srcs;
  }

  const int num_ranks_, in_blocks_, out_blocks_;
  const std::vector<int64_t>& map_;
  std::map<std::pair<int, int>, int32_t> slots_;  // (rank, block)
};

}  // namespace

PlanPrograms MakePrograms(int num_ranks, int in_blocks, int out_blocks,
                          const std::vector<int64_t>& source_map) {
  PlanPrograms p;
  p.num_ranks = num_ranks;
  p.in_blocks = in_blocks;
  p.out_blocks = out_blocks;
  p.ranks.resize(num_ranks);
  p.reduces = std::any_of(source_map.begin(), source_map.end(), [](int64_t v) { return v <= -2; });
  MapWriter(num_ranks, in_blocks, out_blocks, source_map).Write(&p.ranks);
  for (const RankProgram& rank : p.ranks) p.max_slots = std::max(p.max_slots, rank.num_slots);
  return p;
}

std::optional<Failure> MakePrograms(const Plan& plan, PlanPrograms* programs) {
  PlanPrograms p;
  static_cast<PlanShape&>(p) = plan.shape();
  Writer writer(plan, &p);
  if (auto failure = PlanOrder<Writer>(plan, &writer).Run()) return failure;
  writer.Finish();
  for (const RankProgram& rank : p.ranks) p.max_slots = std::max(p.max_slots, rank.num_slots);
  *programs = std::move(p);
  return std::nullopt;
}

}  // namespace jcoll
