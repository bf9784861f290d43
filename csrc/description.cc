#include "description.h"

#include <algorithm>
#include <functional>
#include <map>
#include <set>
#include <utility>

namespace jcoll {
namespace {

const char* At(const void* p, int64_t offset) { return static_cast<const char*>(p) + offset; }
char* At(void* p, int64_t offset) { return static_cast<char*>(p) + offset; }

Failure Malformed(const Description& d, const std::string& what) {
  return {
      FailureCode::kInvalidArgument,
      d.Where() + ": the custom call's attributes do not fit together: " + what + "." + kRecompile};
}

std::optional<Failure> ValidateGroups(const Description& d) {
  if (d.axis_size < 1) return Malformed(d, "axis_size < 1");
  if (d.group_of.size() != d.rank_of.size()) return Malformed(d, "group_of and rank_of differ");
  if (!d.group_of.empty() && static_cast<int>(d.group_of.size()) != d.axis_size) {
    return Malformed(d, "group_of does not cover the axis");
  }
  std::vector<int64_t> positions = d.position_of;
  std::sort(positions.begin(), positions.end());
  for (size_t i = 0; i < positions.size(); ++i) {
    if (positions[i] != static_cast<int64_t>(i)) {
      return Malformed(d, "position_of is no permutation");
    }
  }
  std::set<std::pair<int64_t, int64_t>> taken;
  for (size_t i = 0; i < d.group_of.size(); ++i) {
    const int64_t group = d.group_of[i], rank = d.rank_of[i];
    if (group < 0 || group >= d.axis_size || rank < 0 ||
        rank >= d.group_size(static_cast<int>(group))) {
      return Malformed(d, "a group or rank is out of range");
    }
    if (!taken.insert({group, rank}).second) {
      return Malformed(d, "two positions have the same group and rank");
    }
  }
  return std::nullopt;
}

// Whether every block goes straight from where it is to where it belongs, as one message of its
// own: what RemoteRun::MoveStream takes for granted, which does not look at chunks.
bool MovesWholeBlocks(const PlanPrograms& p) {
  if (p.in_blocks != p.num_ranks || p.out_blocks != p.num_ranks || p.chunks_per_block != 1) {
    return false;
  }
  for (int rank = 0; rank < p.num_ranks; ++rank) {
    std::set<int> received;
    for (const RankProgram::Action& a : p.ranks[rank].actions) {
      if (a.srcs.size() != 1 || a.has_chunk == (a.slot != RankProgram::kNone)) return false;
      const RankProgram::Operand& src = a.srcs[0];
      // The input chunk that is staged, copied, or in the peer's slot.
      std::optional<RankProgram::Origin> from = RankProgram::Origin{src.buffer, src.chunk};
      if (src.slot != RankProgram::kNone) from = p.ranks[src.rank].origins[src.slot];
      if (!from || from->buffer != PlanBuffer::kInput) return false;
      if (!a.has_chunk) {
        if (src.slot != RankProgram::kNone) return false;
        continue;
      }
      if (from->chunk != rank || a.buffer != PlanBuffer::kOutput || a.chunk != src.rank)
        return false;
      received.insert(a.chunk);
    }
    if (static_cast<int>(received.size()) != p.num_ranks) return false;
  }
  return true;
}

std::optional<Failure> ValidateRows(const Description& d) {
  if (d.row_nbytes < 0 || d.in_rows < 0 || d.out_rows < 0 || d.num_updates < 1) {
    return Malformed(d, "negative row counts");
  }
  if (d.index_nbytes != 4 && d.index_nbytes != 8) return Malformed(d, "index_nbytes not 4 or 8");
  if (d.plans.empty()) return std::nullopt;
  if (static_cast<int>(d.plans.size()) != d.num_groups()) return Malformed(d, "a plan is missing");
  for (int g = 0; g < d.num_groups(); ++g) {
    const PlanPrograms& plan = d.plans[g]->programs;
    if (plan.num_ranks != d.group_size(g) || !MovesWholeBlocks(plan)) {
      return Malformed(d, "the plan does not send every block as a whole from rank to rank");
    }
  }
  return std::nullopt;
}

bool CanReduce(const Description& d) {
  return Supports(d.dtype, d.reduce_op) && d.block_nbytes % Size(d.dtype) == 0;
}

Failure DiffersRemotely(const Description& d, const ChunkRef& c) {
  return {FailureCode::kInvalidArgument,
          d.Where() + ": between processes the plan's partial sums are folded, and rank " +
              std::to_string(c.rank) + " would add its output[" + std::to_string(c.chunk) +
              "] in another order than rank 0.\n  Use another algorithm, or have one rank add up "
              "and send the sum."};
}

std::optional<Failure> ValidatePlans(const Description& d) {
  if (static_cast<int>(d.plans.size()) != d.num_groups()) return Malformed(d, "a plan is missing");
  for (int g = 0; g < d.num_groups(); ++g) {
    const PlanMoves& plan = d.plans[g]->moves;
    if (plan.num_ranks != d.group_size(g) || plan.in_blocks != d.in_blocks ||
        plan.out_blocks != d.out_blocks) {
      return Malformed(d, "the plan is one of another op or number of ranks");
    }
    if (!d.process_of.empty() && d.plans[g]->differs_remotely) {
      return DiffersRemotely(d, *d.plans[g]->differs_remotely);
    }
    // A mean is a sum that is divided afterwards; a plan reduces in several passes.
    if (plan.reduces && (!CanReduce(d) || d.reduce_op == ReduceOp::kMean)) {
      return Malformed(d, "this reduction does not exist for this dtype");
    }
  }
  return std::nullopt;
}

std::optional<Failure> ValidateBlocks(const Description& d) {
  if (d.in_blocks < 0 || d.out_blocks < 0 || d.block_nbytes < 0) return Malformed(d, "sizes < 0");
  if (!d.plans.empty()) return ValidatePlans(d);
  int largest = 0, smallest = d.axis_size;
  for (int g = 0; g < d.num_groups(); ++g) {
    largest = std::max(largest, d.group_size(g));
    smallest = std::min(smallest, d.group_size(g));
  }
  if (d.source_map.size() < static_cast<size_t>(largest) * d.out_blocks) {
    return Malformed(d, "source_map is too short");
  }
  bool reduces = false;
  for (int64_t v : d.source_map) {
    if (v >= int64_t{smallest} * d.in_blocks || -2 - v >= d.in_blocks) {
      return Malformed(d, "source_map names a block that does not exist");
    }
    reduces |= v <= -2;
  }
  if (reduces && !CanReduce(d)) {
    return Malformed(d, "this reduction does not exist for this dtype");
  }
  return std::nullopt;
}

// Everybody gets everybody's block.
std::vector<int64_t> GatherMap(int n) {
  std::vector<int64_t> map(static_cast<size_t>(n) * n);
  for (int r = 0; r < n; ++r) {
    for (int b = 0; b < n; ++b) map[r * n + b] = b;
  }
  return map;
}

// Block b of rank r goes to rank b as its block r.
std::vector<int64_t> ExchangeMap(int n) {
  std::vector<int64_t> map(static_cast<size_t>(n) * n);
  for (int r = 0; r < n; ++r) {
    for (int b = 0; b < n; ++b) map[r * n + b] = int64_t{b} * n + r;
  }
  return map;
}

// What must be the same on all ranks beside Description::Signature, for a hash.
std::string Layout(const Description& d) {
  std::string text = std::to_string(d.block_nbytes);
  for (int64_t n :
       {d.row_nbytes, d.in_rows, d.out_rows, int64_t{d.index_nbytes}, int64_t{d.num_updates}}) {
    text += "/" + std::to_string(n);
  }
  for (int64_t v : d.source_map) text += "," + std::to_string(v);
  for (const auto& plan : d.plans) text += ";" + std::to_string(plan->digest);
  return text;
}

// Blocks with the same source become one move with several destinations: a block that every rank
// needs is read (or reduced) once.
void BuildBlockMoves(const Description& d, const std::vector<RankBuffers>& ranks, MoveList* moves) {
  const int num_ranks = static_cast<int>(ranks.size());
  std::map<int64_t, std::vector<void*>> destinations;
  for (int rank = 0; rank < num_ranks; ++rank) {
    for (int b = 0; b < d.out_blocks; ++b) {
      const int64_t source = d.source_map[rank * d.out_blocks + b];
      destinations[source].push_back(At(ranks[rank].outputs[0], b * d.block_nbytes));
    }
  }
  for (const auto& [source, dsts] : destinations) {
    moves->Begin(d.block_nbytes);
    if (source >= 0) {
      const int64_t block = source % d.in_blocks;
      moves->AddSource(At(ranks[source / d.in_blocks].inputs[0], block * d.block_nbytes));
    } else if (source <= -2) {
      for (const RankBuffers& r : ranks) {
        moves->AddSource(At(r.inputs[0], (-2 - source) * d.block_nbytes));
      }
    }
    for (void* dst : dsts) moves->AddDestination(dst);
  }
}

}  // namespace

int Description::num_groups() const {
  if (group_of.empty()) return 1;
  return static_cast<int>(*std::max_element(group_of.begin(), group_of.end())) + 1;
}

int Description::group_size(int group) const {
  if (group_of.empty()) return axis_size;
  return static_cast<int>(std::count(group_of.begin(), group_of.end(), group));
}

std::shared_ptr<const PlanPrograms> Description::ProgramsOf(int group) const {
  if (plans.empty()) return map_programs[group];
  return {plans[group], &plans[group]->programs};
}

void Description::MakeRemote() {
  auto make = [](int num_ranks, int in, int out, const std::vector<int64_t>& map) {
    return std::make_shared<const PlanPrograms>(MakePrograms(num_ranks, in, out, map));
  };
  for (int g = 0; g < num_groups(); ++g) {
    const int n = group_size(g);
    if (motion == Motion::kBlocks) {
      if (plans.empty()) map_programs.push_back(make(n, in_blocks, out_blocks, source_map));
    } else {
      if (plans.empty()) map_programs.push_back(make(n, n, n, ExchangeMap(n)));
      count_programs.push_back(make(n, 1, n, GatherMap(n)));
    }
  }
  const std::string what = Signature();
  const std::hash<std::string> hash;
  remote_name = {Where(), what, call_site.empty() ? "" : " called at " + call_site,
                 hash(what + Layout(*this)), hash(program)};
  device_at.resize(position_of.size());
  for (size_t device = 0; device < position_of.size(); ++device) {
    device_at[position_of[device]] = static_cast<int64_t>(device);
  }
}

int64_t Description::PositionOf(int64_t mesh_group, int group, int rank) const {
  int64_t index = rank;
  for (size_t i = 0; i < group_of.size(); ++i) {
    if (group_of[i] == group && rank_of[i] == rank) index = static_cast<int64_t>(i);
  }
  return mesh_group * axis_size + index;
}

std::string Description::Signature() const {
  std::string text = "jcoll." + op + " over axis " + axis + " (" + signature;
  const bool reduces =
      !plans.empty()
          ? plans[0]->moves.reduces
          : !source_map.empty() && *std::min_element(source_map.begin(), source_map.end()) < -1;
  if (reduces) text += std::string(", ") + Name(reduce_op);
  if (root >= 0) text += ", root " + std::to_string(root);
  return text + ", " + algorithm + ")";
}

std::string Description::Where() const {
  std::string text =
      "jcoll." + op + " over axis " + axis + " (" + signature + ", " + algorithm + ")";
  if (!call_site.empty()) text += " called at " + call_site;
  return text;
}

std::optional<Failure> Description::Validate() const {
  if (auto failure = ValidateGroups(*this)) return failure;
  return motion == Motion::kBlocks ? ValidateBlocks(*this) : ValidateRows(*this);
}

std::optional<Failure> BuildMoves(const Description& d, const std::vector<RankBuffers>& ranks,
                                  MoveList* moves) {
  moves->Clear();
  switch (d.motion) {
    case Motion::kBlocks:
      BuildBlockMoves(d, ranks, moves);
      return std::nullopt;
    case Motion::kRagged:
      return BuildRaggedMoves(d, ranks, moves);
    case Motion::kVariable:
    case Motion::kVariableBack:
      return BuildVariableMoves(d, ranks, moves);
  }
  return Failure{FailureCode::kInternal, "unknown motion"};
}

}  // namespace jcoll
