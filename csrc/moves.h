// Moves: what a "direct" collective does with memory, as a flat list.
//
// A move reads n source ranges and writes m destination ranges, all of the same length: a reduction
// (n sources), a copy (one source) or zeros (none). The moves of one collective write disjoint
// ranges, so that they can be cut into pieces and run on any thread in any order.
#pragma once

#include <cstdint>
#include <vector>

#include "reduce.h"

namespace jcoll {

// The buffers that one rank brings. Metadata operands (offsets, counts) are inputs too.
struct RankBuffers {
  static constexpr int kMaxInputs = 6;
  static constexpr int kMaxOutputs = 3;
  const void* inputs[kMaxInputs] = {};
  void* outputs[kMaxOutputs] = {};
};

// dsts = the reduction of srcs, a copy of one, or zeros of none: nbytes each. `reduce` is needed
// from two on, of elements of element_nbytes.
void Transfer(const void* const* srcs, int num_srcs, void* const* dsts, int num_dsts,
              int64_t nbytes, ReduceFn reduce, int64_t element_nbytes, bool stream);

class MoveList {
 public:
  struct Move {
    int first_src, num_srcs;
    int first_dst, num_dsts;
    int64_t nbytes;  // Of each source and destination.
  };
  // A piece of a move: bytes [begin, end) of each of its ranges.
  struct Piece {
    int move;
    int64_t begin, end;
  };

  void Clear();
  // Between Begin and the next Begin, AddSource and AddDestination add to the same move.
  void Begin(int64_t nbytes);
  void AddSource(const void* p);
  void AddDestination(void* p);
  void AddCopy(const void* src, void* dst, int64_t nbytes);
  void AddZero(void* dst, int64_t nbytes);
  // A copy of rows that one rank sends to another, or to itself.
  void AddRows(const void* src, void* dst, int64_t nbytes);

  // Bytes read plus bytes written by all moves.
  int64_t traffic_nbytes() const;
  // What AddRows has added.
  int64_t rows_nbytes() const { return rows_nbytes_; }
  // Whether they should bypass the cache when they write.
  bool ShouldStream() const;
  // Cuts the moves so that a piece causes about `piece_traffic_nbytes` of traffic.
  std::vector<Piece> Cut(int64_t piece_traffic_nbytes) const;
  Piece Whole(int move) const { return {move, 0, moves_[move].nbytes}; }
  // fn(source or null, destination, bytes) for every move; of lists without reductions.
  template <typename Fn>
  void ForEach(Fn fn) const {
    for (const Move& m : moves_) {
      for (int i = 0; i < m.num_dsts; ++i) {
        fn(m.num_srcs ? srcs_[m.first_src] : nullptr, dsts_[m.first_dst + i], m.nbytes);
      }
    }
  }
  int size() const { return static_cast<int>(moves_.size()); }

  // Has the pages that a piece will write mapped, where they are fresh and that pays.
  void Prefault(const Piece& piece) const;

  // Runs a piece. `reduce` is needed by moves with more than one source.
  void Run(const Piece& piece, ReduceFn reduce, int64_t element_nbytes, bool stream) const;

 private:
  std::vector<Move> moves_;
  std::vector<const void*> srcs_;
  std::vector<void*> dsts_;
  int64_t rows_nbytes_ = 0;
};

}  // namespace jcoll
