#include "description.h"

#include <algorithm>
#include <map>

namespace jcoll {
namespace {

const char* At(const void* p, int64_t offset) { return static_cast<const char*>(p) + offset; }
char* At(void* p, int64_t offset) { return static_cast<char*>(p) + offset; }

Failure Malformed(const Description& d, const std::string& what) {
  return {FailureCode::kInvalidArgument,
          d.Where() + ": the custom call's attributes do not fit together: " + what +
              ". Programs must be compiled with the jcoll version that runs them."};
}

// Blocks with the same source become one move with several destinations: a block that every rank
// needs is read (or reduced) once.
void BuildBlockMoves(const Description& d, const std::vector<RankBuffers>& ranks,
                     MoveList* moves) {
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

std::string Description::Where() const {
  std::string text = "jcoll." + op + " over axis " + axis + " (" + signature + ", " + algorithm + ")";
  if (!call_site.empty()) text += " called at " + call_site;
  return text;
}

std::optional<Failure> Description::Validate() const {
  if (axis_size < 1) return Malformed(*this, "axis_size < 1");
  if (group_of.size() != rank_of.size()) return Malformed(*this, "group_of and rank_of differ");
  if (!group_of.empty() && static_cast<int>(group_of.size()) != axis_size) {
    return Malformed(*this, "group_of does not cover the axis");
  }
  for (size_t i = 0; i < group_of.size(); ++i) {
    if (group_of[i] < 0 || group_of[i] >= axis_size || rank_of[i] < 0 ||
        rank_of[i] >= group_size(static_cast<int>(group_of[i]))) {
      return Malformed(*this, "a group or rank is out of range");
    }
  }
  if (motion != Motion::kBlocks) {
    if (row_nbytes < 0 || in_rows < 0 || out_rows < 0 || num_updates < 1) {
      return Malformed(*this, "negative row counts");
    }
    return std::nullopt;
  }
  if (in_blocks < 0 || out_blocks < 0 || block_nbytes < 0) return Malformed(*this, "sizes < 0");
  int largest = 0, smallest = axis_size;
  for (int g = 0; g < num_groups(); ++g) {
    largest = std::max(largest, group_size(g));
    smallest = std::min(smallest, group_size(g));
  }
  if (source_map.size() < static_cast<size_t>(largest) * out_blocks) {
    return Malformed(*this, "source_map is too short");
  }
  for (int64_t v : source_map) {
    if (v >= int64_t{smallest} * in_blocks || -2 - v >= in_blocks) {
      return Malformed(*this, "source_map names a block that does not exist");
    }
  }
  const bool reduces = std::any_of(source_map.begin(), source_map.end(),
                                   [](int64_t v) { return v <= -2; });
  if (reduces && (!Supports(dtype, reduce_op) || block_nbytes % Size(dtype) != 0)) {
    return Malformed(*this, "this reduction does not exist for this dtype");
  }
  return std::nullopt;
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
