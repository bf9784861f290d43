// CompilePlan: from the programs of csrc/shm/program.h, which pull, to those that push.
#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "cuda/kernels/plan_program.h"

namespace jcoll::gpu {
namespace {

constexpr int32_t kNone = RankProgram::kNone;
using Action = RankProgram::Action;
using Operand = RankProgram::Operand;

bool IsSent(const Operand& operand) { return operand.slot != kNone; }

// One flag for each chunk of a rank's OUTPUT and SCRATCH.
class ChunkSet {
 public:
  explicit ChunkSet(const PlanShape& shape)
      : num_outputs_(shape.out_blocks * shape.chunks_per_block),
        flags_(num_outputs_ + shape.num_scratch) {}
  void AddAllOutputs() { std::fill_n(flags_.begin(), num_outputs_, 1); }
  char& operator()(PlanBuffer buffer, int32_t chunk) {
    return flags_[buffer == PlanBuffer::kOutput ? chunk : num_outputs_ + chunk];
  }

 private:
  int32_t num_outputs_;
  std::vector<char> flags_;
};

// Values that are overwritten, or forgotten at the end, before anybody reads them are not stored.
void RemoveDeadStores(const PlanShape& shape, RankProgram* program) {
  ChunkSet needed(shape);
  needed.AddAllOutputs();
  for (auto a = program->actions.rbegin(); a != program->actions.rend(); ++a) {
    if (a->has_chunk) a->has_chunk = std::exchange(needed(a->buffer, a->chunk), 0) != 0;
    for (const Operand& src : a->srcs) {
      if (!IsSent(src) && src.buffer != PlanBuffer::kInput) needed(src.buffer, src.chunk) = 1;
    }
  }
}

class Compiler {
 public:
  Compiler(const PlanPrograms& programs, PlanProtocol protocol)
      : shape_(programs), protocol_(protocol), ranks_(programs.ranks) {
    for (RankProgram& rank : ranks_) RemoveDeadStores(shape_, &rank);
    for (int r = 0; r < num_ranks(); ++r) FindReceivers(r);
    for (int r = 0; r < num_ranks(); ++r) PlaceWhatIsSent(r);
  }

  // Appends every rank's code to its image.
  PlanProgram::Variant Write(std::vector<std::vector<int32_t>>* images) {
    PlanProgram::Variant variant;
    for (int r = 0; r < num_ranks(); ++r) {
      variant.ranks.push_back(WriteRank(r, &(*images)[r]));
      variant.num_slots = std::max(variant.num_slots, num_slots_[r] + shape_.num_scratch);
      variant.num_messages = std::max(variant.num_messages, ranks_[r].num_messages);
    }
    return variant;
  }

 private:
  struct Slot {
    int32_t sender, slot;  // As RankProgram numbers them.
    bool operator<(const Slot& o) const {
      return std::tie(sender, slot) < std::tie(o.sender, o.slot);
    }
  };
  struct Home {
    PlanPlace place;
    int32_t index;
  };

  int num_ranks() const { return static_cast<int>(ranks_.size()); }

  // Every message has one receiver: the rank with operands that wait for it.
  void FindReceivers(int receiver) {
    for (const Action& action : ranks_[receiver].actions) {
      for (const Operand& src : action.srcs) {
        if (!IsSent(src)) continue;
        receivers_[{src.rank, src.message}] = receiver;
      }
    }
  }

  // Where in `receiver` the values that it is sent will lie.
  void PlaceWhatIsSent(int receiver) {
    std::map<Slot, int> num_uses;
    std::vector<int> num_stores(static_cast<size_t>(shape_.out_blocks) * shape_.chunks_per_block);
    for (const Action& action : ranks_[receiver].actions) {
      for (const Operand& src : action.srcs) num_uses[{src.rank, src.slot}] += IsSent(src);
      if (action.has_chunk && action.buffer == PlanBuffer::kOutput) ++num_stores[action.chunk];
    }
    num_slots_.push_back(0);
    homes_.emplace_back();
    for (Action& action : ranks_[receiver].actions) {
      const bool is_kept = action.srcs.size() == 1 && IsSent(action.srcs[0]) && action.has_chunk &&
                           action.buffer == PlanBuffer::kOutput && num_stores[action.chunk] == 1 &&
                           num_uses[{action.srcs[0].rank, action.srcs[0].slot}] == 1;
      if (is_kept && protocol_ == PlanProtocol::kSimple) {
        Place({action.srcs[0].rank, action.srcs[0].slot}, receiver,
              {PlanPlace::kOutput, action.chunk / shape_.chunks_per_block});
        action.has_chunk = false;
        continue;
      }
      for (const Operand& src : action.srcs) {
        if (!IsSent(src) || homes_[receiver].count({src.rank, src.slot})) continue;
        Place({src.rank, src.slot}, receiver, {PlanPlace::kSlot, num_slots_[receiver]++});
      }
    }
  }

  void Place(const Slot& slot, int receiver, const Home& home) {
    homes_[receiver][slot] = home;
    targets_[slot].push_back({receiver, home.place, home.index});
  }

  PlanProgram::Rank WriteRank(int rank, std::vector<int32_t>* image) {
    actions_.clear();
    sources_.clear();
    all_targets_.clear();
    posts_.clear();
    std::vector<int32_t> senders, receivers;
    int32_t num_messages = 0;
    for (const Action& a : ranks_[rank].actions) AddAction(rank, a, &num_messages);
    for (const auto& [slot, home] : homes_[rank]) AddOnce(slot.sender, &senders);
    for (const PlanTarget& target : all_targets_) {
      if (target.rank != rank) AddOnce(target.rank, &receivers);
    }
    PlanProgram::Rank code;
    code.actions = Append(actions_, image);
    code.sources = Append(sources_, image);
    code.targets = Append(all_targets_, image);
    code.posts = Append(posts_, image);
    code.senders = Append(senders, image);
    code.receivers = Append(receivers, image);
    return code;
  }

  void AddAction(int rank, const Action& a, int32_t* num_messages) {
    PlanAction action = {};
    action.part = a.part;
    action.first_source = static_cast<int32_t>(sources_.size());
    action.first_target = static_cast<int32_t>(all_targets_.size());
    action.first_post = static_cast<int32_t>(posts_.size());
    for (const Operand& src : a.srcs) sources_.push_back(SourceOf(rank, src));
    if (a.has_chunk) {
      const Home home = HomeOf(rank, a.buffer, a.chunk);
      all_targets_.push_back({rank, home.place, home.index});
    }
    if (a.slot != kNone) {
      const auto& targets = targets_[{rank, a.slot}];
      all_targets_.insert(all_targets_.end(), targets.begin(), targets.end());
    }
    // Of several messages to one peer, the last says it all.
    std::map<int32_t, int32_t> posts;
    for (int i = 0; i < a.num_posts; ++i) {
      const int32_t message = (*num_messages)++;
      posts[receivers_.at({rank, message})] = message + 1;
    }
    for (const auto& [peer, messages] : posts) posts_.push_back({peer, messages});
    action.num_sources = static_cast<int32_t>(sources_.size()) - action.first_source;
    action.num_targets = static_cast<int32_t>(all_targets_.size()) - action.first_target;
    action.num_posts = static_cast<int32_t>(posts_.size()) - action.first_post;
    // What arrives is waited for, even where nobody reads it: afterwards its place is free.
    if (action.num_sources + action.num_targets + action.num_posts > 0) actions_.push_back(action);
  }

  PlanSource SourceOf(int rank, const Operand& src) {
    if (IsSent(src)) {
      const Home home = homes_[rank].at({src.rank, src.slot});
      return {home.place, home.index, src.rank, src.message + 1};
    }
    const Home home = HomeOf(rank, src.buffer, src.chunk);
    return {home.place, home.index, PlanSource::kNobody, 0};
  }

  // SCRATCH is in slots of a rank's own, behind those that others store to.
  Home HomeOf(int rank, PlanBuffer buffer, int32_t chunk) const {
    if (buffer == PlanBuffer::kScratch) return {PlanPlace::kSlot, num_slots_[rank] + chunk};
    const PlanPlace place = buffer == PlanBuffer::kInput ? PlanPlace::kInput : PlanPlace::kOutput;
    return {place, chunk / shape_.chunks_per_block};
  }

  static void AddOnce(int32_t rank, std::vector<int32_t>* ranks) {
    if (std::find(ranks->begin(), ranks->end(), rank) == ranks->end()) ranks->push_back(rank);
  }

  template <typename T>
  static PlanProgram::Part Append(const std::vector<T>& records, std::vector<int32_t>* image) {
    static_assert(sizeof(T) % sizeof(int32_t) == 0);
    const auto* words = reinterpret_cast<const int32_t*>(records.data());
    const PlanProgram::Part part = {static_cast<int32_t>(image->size()),
                                    static_cast<int32_t>(records.size())};
    image->insert(image->end(), words, words + records.size() * (sizeof(T) / sizeof(int32_t)));
    return part;
  }

  const PlanShape shape_;
  const PlanProtocol protocol_;
  std::vector<RankProgram> ranks_;
  std::map<std::pair<int32_t, int32_t>, int32_t> receivers_;  // By (sender, message).
  std::map<Slot, std::vector<PlanTarget>> targets_;
  std::vector<std::map<Slot, Home>> homes_;  // By receiver.
  std::vector<int32_t> num_slots_;           // That others store to, by rank.
  // Of the rank that is being written.
  std::vector<PlanAction> actions_;
  std::vector<PlanSource> sources_;
  std::vector<PlanTarget> all_targets_;
  std::vector<PlanPost> posts_;
};

}  // namespace

PlanProgram CompilePlan(const PlanPrograms& programs) {
  PlanProgram program;
  static_cast<PlanShape&>(program) = programs;
  program.images.resize(programs.num_ranks);
  program.simple = Compiler(programs, PlanProtocol::kSimple).Write(&program.images);
  program.ll = Compiler(programs, PlanProtocol::kLL).Write(&program.images);
  return program;
}

}  // namespace jcoll::gpu
