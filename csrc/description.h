// What one collective instruction of a compiled program is: fixed at compile time, the same on all
// ranks. Filled from the attributes of the custom call (ffi.cc).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "dtype.h"
#include "failure.h"
#include "moves.h"
#include "plan_store.h"
#include "reduce.h"
#include "shm/remote_run.h"

namespace jcoll {

// The end of every error that a foreign or damaged program causes.
constexpr char kRecompile[] =
    "\n  Programs must be compiled with the jcoll version that runs them.";

// How the outputs follow from the inputs.
enum class Motion {
  kBlocks,        // Dense: Description::source_map says where each output block comes from.
  kRagged,        // lax.ragged_all_to_all: rows, offsets and sizes brought by every rank.
  kVariable,      // all_to_all_v: rows packed by destination, only the counts are brought.
  kVariableBack,  // The transpose of kVariable: rows travel back to where they came from.
};

struct Description {
  // For people: in errors, metrics and traces.
  std::string op, axis, algorithm, call_site, signature, dtype_name;
  double timeout_s = 0;  // <= 0: the process-wide default.
  int64_t nbytes = 0;    // One rank's size S as nccl-tests counts it.

  // Who. A rank's position on the collective's axes is 0..axis_size-1; axis_index_groups splits
  // these positions into groups (empty: one group of all, rank = position).
  int axis_size = 1;
  std::vector<int64_t> group_of, rank_of;
  // The position in the mesh of every logical device (XLA's partition id), as Site::Arrive takes
  // it; empty: equal to the id, as on a mesh of one axis.
  std::vector<int64_t> position_of;

  // JAX's process index for every position in the mesh; empty: all are of this process. The call's
  // name among processes: the program's, its number there, and how often it has been instantiated.
  std::vector<int64_t> process_of;
  std::string program;
  int64_t site_index = 0, ordinal = 0;
  int root = -1;  // Of a rooted op, for Signature.
  // The logical device of every position in the mesh, which position_of is the inverse of; empty:
  // equal. For calls over several processes.
  std::vector<int64_t> device_at;
  // The position in the mesh of a rank.
  int64_t PositionOf(int64_t mesh_group, int group, int rank) const;

  Motion motion = Motion::kBlocks;
  DType dtype = DType::kU8;
  ReduceOp reduce_op = ReduceOp::kSum;

  // kBlocks. Every rank brings in_blocks and receives out_blocks blocks of block_nbytes each.
  // source_map[rank * out_blocks + b] tells what block b of `rank` becomes:
  //   v >= 0   a copy of block v % in_blocks of rank v / in_blocks
  //   v == -1  zeros
  //   v <= -2  the reduction over all ranks of their block -2 - v
  int in_blocks = 1, out_blocks = 1;
  int64_t block_nbytes = 0;
  std::vector<int64_t> source_map;

  // The plan of every group, where one is followed: kBlocks, with the blocks of its op, and
  // source_map is not looked at. Empty: "direct".
  std::vector<std::shared_ptr<const LoadedPlan>> plans;

  // kRagged, kVariable, kVariableBack: rows of row_nbytes; counts and offsets of index_nbytes each.
  int64_t row_nbytes = 0, in_rows = 0, out_rows = 0;
  int index_nbytes = 4;
  int num_updates = 1;         // kRagged: updates per pair of ranks.
  bool drop_overflow = false;  // kVariable: rows beyond out_rows are dropped and counted.

  // The programs of a group whose ranks are in several processes: its plan's, or those that follow
  // from source_map; for rows, those of an exchange of all pairs at once.
  std::shared_ptr<const PlanPrograms> ProgramsOf(int group) const;
  std::vector<std::shared_ptr<const PlanPrograms>> map_programs;    // By group.
  std::vector<std::shared_ptr<const PlanPrograms>> count_programs;  // By group; see RowRun.
  RemoteName remote_name;
  // Fills in these and device_at, once, for calls over several processes.
  void MakeRemote();

  // The buffers that the motion reads and writes.
  int num_inputs() const {
    return motion == Motion::kBlocks ? 1 : motion == Motion::kRagged ? 6 : 2;
  }
  // Inputs from here on are counts and offsets.
  int first_index_input() const { return motion == Motion::kRagged ? 2 : 1; }
  int num_outputs() const { return motion == Motion::kVariable ? 3 : 1; }
  int64_t input_nbytes() const {
    return motion == Motion::kBlocks ? in_blocks * block_nbytes : in_rows * row_nbytes;
  }
  int64_t output_nbytes() const {
    return motion == Motion::kBlocks ? out_blocks * block_nbytes : out_rows * row_nbytes;
  }
  int num_groups() const;
  int group_size(int group) const;

  // What must be the same on all ranks, for people: op, type, reduction, root, algorithm, axis.
  std::string Signature() const;

  // Where and what, the first part of every error:
  // "jcoll.all_reduce over axis 'x' (float32[8], direct) called at train.py:42".
  std::string Where() const;

  // Fails if the attributes do not fit together (a damaged or foreign program).
  std::optional<Failure> Validate() const;
};

// Fills `moves` for a group of `ranks`. Fails if the ranks' metadata do not fit together.
std::optional<Failure> BuildMoves(const Description& d, const std::vector<RankBuffers>& ranks,
                                  MoveList* moves);

// The ragged half of BuildMoves (ragged.cc).
std::optional<Failure> BuildRaggedMoves(const Description& d, const std::vector<RankBuffers>& ranks,
                                        MoveList* moves);
std::optional<Failure> BuildVariableMoves(const Description& d,
                                          const std::vector<RankBuffers>& ranks, MoveList* moves);

}  // namespace jcoll
