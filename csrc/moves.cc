#include "moves.h"

#include <algorithm>

#include "memory.h"

namespace jcoll {

void Transfer(const void* const* srcs, int num_srcs, void* const* dsts, int num_dsts,
              int64_t nbytes, ReduceFn reduce, int64_t element_nbytes, bool stream) {
  if (num_srcs == 0) {
    for (int i = 0; i < num_dsts; ++i) Zero(dsts[i], nbytes, stream);
  } else if (num_srcs == 1) {
    CopyTo(srcs[0], dsts, num_dsts, nbytes, stream);
  } else {
    reduce(srcs, num_srcs, dsts, num_dsts, nbytes / element_nbytes, stream);
  }
}

void MoveList::Clear() {
  moves_.clear();
  srcs_.clear();
  dsts_.clear();
  rows_nbytes_ = 0;
}

void MoveList::Begin(int64_t nbytes) {
  moves_.push_back({static_cast<int>(srcs_.size()), 0, static_cast<int>(dsts_.size()), 0, nbytes});
}

void MoveList::AddSource(const void* p) {
  srcs_.push_back(p);
  ++moves_.back().num_srcs;
}

void MoveList::AddDestination(void* p) {
  dsts_.push_back(p);
  ++moves_.back().num_dsts;
}

void MoveList::AddCopy(const void* src, void* dst, int64_t nbytes) {
  if (nbytes == 0 || src == dst) return;
  Begin(nbytes);
  AddSource(src);
  AddDestination(dst);
}

void MoveList::AddRows(const void* src, void* dst, int64_t nbytes) {
  AddCopy(src, dst, nbytes);
  rows_nbytes_ += nbytes;
}

void MoveList::AddZero(void* dst, int64_t nbytes) {
  if (nbytes == 0) return;
  Begin(nbytes);
  AddDestination(dst);
}

int64_t MoveList::traffic_nbytes() const {
  int64_t total = 0;
  for (const Move& m : moves_) total += m.nbytes * (m.num_srcs + m.num_dsts);
  return total;
}

bool MoveList::ShouldStream() const {
  bool reduces = false, fans_out = false;
  for (const Move& m : moves_) {
    reduces |= m.num_srcs > 1;
    fans_out |= m.num_dsts > 1;
  }
  return jcoll::ShouldStream(traffic_nbytes(), reduces, fans_out);
}

std::vector<MoveList::Piece> MoveList::Cut(int64_t piece_traffic_nbytes) const {
  // A multiple of the page size: pieces then begin on an element and, if the buffers are aligned,
  // no two threads share a page or a cache line.
  constexpr int64_t kPage = 4096;
  std::vector<Piece> pieces;
  for (int i = 0; i < size(); ++i) {
    const Move& m = moves_[i];
    const int64_t streams = std::max(1, m.num_srcs + m.num_dsts);
    const int64_t step = std::max(kPage, piece_traffic_nbytes / streams / kPage * kPage);
    for (int64_t begin = 0; begin < m.nbytes; begin += step) {
      pieces.push_back({i, begin, std::min(begin + step, m.nbytes)});
    }
  }
  return pieces;
}

void MoveList::Prefault(const Piece& piece) const {
  const Move& m = moves_[piece.move];
  // Up to two destinations are written in long runs, in which faults cost no more than populating
  // does: an all_gather of 4 MiB on 2 ranks took 522 us with faults, 644 us with pages populated
  // first.
  if (m.num_dsts <= 2) return;
  for (int i = 0; i < m.num_dsts; ++i) {
    jcoll::Prefault(static_cast<char*>(dsts_[m.first_dst + i]) + piece.begin,
                    piece.end - piece.begin);
  }
}

void MoveList::Run(const Piece& piece, ReduceFn reduce, int64_t element_nbytes, bool stream) const {
  const Move& m = moves_[piece.move];
  const int64_t nbytes = piece.end - piece.begin;
  // Scratch of this thread; grows to the largest group once.
  thread_local std::vector<const void*> srcs;
  thread_local std::vector<void*> dsts;
  srcs.resize(m.num_srcs);
  dsts.resize(m.num_dsts);
  for (int i = 0; i < m.num_srcs; ++i) {
    srcs[i] = static_cast<const char*>(srcs_[m.first_src + i]) + piece.begin;
  }
  for (int i = 0; i < m.num_dsts; ++i) {
    dsts[i] = static_cast<char*>(dsts_[m.first_dst + i]) + piece.begin;
  }
  Transfer(srcs.data(), m.num_srcs, dsts.data(), m.num_dsts, nbytes, reduce, element_nbytes,
           stream);
}

}  // namespace jcoll
