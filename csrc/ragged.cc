// Ragged collectives: which rows go where is brought by the ranks at run time. Everything is
// checked before a byte moves; an error names the pair of ranks that do not fit together.

#include <algorithm>
#include <cstring>
#include <string>

#include "description.h"

namespace jcoll {
namespace {

const char* Row(const void* p, int64_t row, int64_t row_nbytes) {
  return static_cast<const char*>(p) + row * row_nbytes;
}
char* Row(void* p, int64_t row, int64_t row_nbytes) {
  return static_cast<char*>(p) + row * row_nbytes;
}

// A rank's array of counts or offsets, int32 or int64.
class IndexArray {
 public:
  IndexArray(const void* data, int nbytes) : data_(data), nbytes_(nbytes) {}
  int64_t operator[](int64_t i) const {
    if (nbytes_ == 8) return Load<int64_t>(i);
    return Load<int32_t>(i);
  }

 private:
  template <typename T>
  int64_t Load(int64_t i) const {
    T value;
    std::memcpy(&value, static_cast<const char*>(data_) + i * sizeof(T), sizeof(T));
    return value;
  }
  const void* data_;
  int nbytes_;
};

void StoreIndex(void* data, int nbytes, int64_t i, int64_t value) {
  if (nbytes == 8) {
    std::memcpy(static_cast<char*>(data) + i * 8, &value, 8);
  } else {
    const int32_t narrow = static_cast<int32_t>(value);
    std::memcpy(static_cast<char*>(data) + i * 4, &narrow, 4);
  }
}

std::string Str(int64_t value) { return std::to_string(value); }

Failure Bad(const Description& d, const std::string& got_and_needed, const std::string& fix) {
  return {FailureCode::kInvalidArgument, d.Where() + ": " + got_and_needed + "\n  " + fix};
}

std::string Pair(int src, int dst) { return "rank " + Str(src) + " sends to rank " + Str(dst); }

// Rows [begin, begin + count) arriving at one rank from `src`.
struct Arriving {
  int64_t begin, count;
  int src;
};

// Copies the rows of `base` that no arriving range covers: the value an output row keeps.
// `arriving` is sorted by begin and free of overlaps.
void KeepUncovered(const std::vector<Arriving>& arriving, const void* base, void* out,
                   const Description& d, MoveList* moves) {
  int64_t row = 0;
  auto keep_until = [&](int64_t end) {
    const int64_t nbytes = (end - row) * d.row_nbytes;
    if (nbytes <= 0) return;
    if (base == nullptr) {
      moves->AddZero(Row(out, row, d.row_nbytes), nbytes);
    } else {
      moves->AddCopy(Row(base, row, d.row_nbytes), Row(out, row, d.row_nbytes), nbytes);
    }
  };
  for (const Arriving& a : arriving) {
    keep_until(a.begin);
    row = std::max(row, a.begin + a.count);
  }
  keep_until(d.out_rows);
}

// One update of lax.ragged_all_to_all, as the sender and the receiver each describe it.
struct Update {
  int64_t input_offset, send_size, output_offset, recv_size;
};

std::optional<Failure> CheckUpdate(const Description& d, int src, int dst, const Update& u) {
  if (u.send_size == 0 && u.recv_size == 0) return std::nullopt;  // Its offsets mean nothing.
  const std::string pair = Pair(src, dst);
  if (u.send_size < 0 || u.recv_size < 0 || u.input_offset < 0 || u.output_offset < 0) {
    return Bad(d,
               pair + " a negative size or offset: send_size=" + Str(u.send_size) +
                   ", recv_size=" + Str(u.recv_size) + ", input_offset=" + Str(u.input_offset) +
                   ", output_offset=" + Str(u.output_offset) + "; all must be >= 0.",
               "Check how the counts are computed on rank " + Str(src) + ".");
  }
  if (u.send_size != u.recv_size) {
    return Bad(d,
               pair + " " + Str(u.send_size) + " rows (send_sizes), but rank " + Str(dst) +
                   " expects " + Str(u.recv_size) + " from it (recv_sizes); these must be equal.",
               "Exchange the counts first: recv_sizes = jcoll.all_to_all(send_sizes, axis, 0, 0, "
               "tiled=True), or use jcoll.all_to_all_v, which does.");
  }
  // Compared without adding: offset + size could overflow.
  if (u.send_size > d.in_rows - u.input_offset) {
    return Bad(d,
               pair + " rows " + Str(u.input_offset) + " to " + Str(u.input_offset) + "+" +
                   Str(u.send_size) + ", but its operand has " + Str(d.in_rows) + " rows.",
               "Make input_offsets + send_sizes fit the operand.");
  }
  if (u.send_size > d.out_rows - u.output_offset) {
    return Bad(d,
               pair + " " + Str(u.send_size) + " rows at row " + Str(u.output_offset) +
                   ", but the output there has " + Str(d.out_rows) + " rows.",
               "Make output_offsets + send_sizes fit the output, or enlarge the output.");
  }
  return std::nullopt;
}

std::optional<Failure> CheckOverlap(const Description& d, int dst,
                                    const std::vector<Arriving>& arriving) {
  for (size_t i = 1; i < arriving.size(); ++i) {
    const Arriving &a = arriving[i - 1], &b = arriving[i];
    if (a.begin + a.count <= b.begin) continue;
    return Bad(d,
               "ranks " + Str(a.src) + " and " + Str(b.src) + " both write row " + Str(b.begin) +
                   " of rank " + Str(dst) + "'s output; every row may be written once.",
               "Make the output_offsets of ranks " + Str(a.src) + " and " + Str(b.src) +
                   " for rank " + Str(dst) + " disjoint.");
  }
  return std::nullopt;
}

// Prefix sums of one rank's send_counts, checked against its operand.
struct Counts {
  std::vector<int64_t> count, offset;
  int64_t total = 0;
};

std::optional<Failure> ReadCounts(const Description& d, const std::vector<RankBuffers>& ranks,
                                  std::vector<Counts>* all, int64_t packed_rows) {
  const int num_ranks = static_cast<int>(ranks.size());
  all->resize(num_ranks);
  for (int src = 0; src < num_ranks; ++src) {
    const IndexArray counts(ranks[src].inputs[1], d.index_nbytes);
    Counts& c = (*all)[src];
    for (int dst = 0; dst < num_ranks; ++dst) {
      if (counts[dst] < 0 || counts[dst] > packed_rows - c.total) {
        return Bad(d,
                   Pair(src, dst) + " send_counts[" + Str(dst) + "]=" + Str(counts[dst]) +
                       " rows after " + Str(c.total) + " for lower ranks, but its operand has " +
                       Str(packed_rows) + " rows; counts must be >= 0 and fit the operand.",
                   "Check how send_counts is computed on rank " + Str(src) + ".");
      }
      c.count.push_back(counts[dst]);
      c.offset.push_back(c.total);
      c.total += counts[dst];
    }
  }
  return std::nullopt;
}

Failure Overflow(const Description& d, const std::vector<Counts>& all, int dst, int64_t room) {
  std::string list;
  int64_t total = 0;
  int first = -1;
  for (size_t src = 0; src < all.size(); ++src) {
    const int64_t count = all[src].count[dst];
    if (total <= room && total + count > room) first = static_cast<int>(src);
    total += count;
    list += (src == 0 ? "" : ", ") + Str(count);
  }
  return Bad(d,
             "rank " + Str(dst) + " is sent " + Str(total) + " rows (" + list +
                 " by rank), but output_size=" + Str(room) + "; the rows of rank " + Str(first) +
                 " for rank " + Str(dst) + " are the first that do not fit.",
             "Raise output_size to at least " + Str(total) +
                 ", or pass overflow=\"drop\" to drop and count the rows beyond it.");
}

}  // namespace

std::optional<Failure> BuildRaggedMoves(const Description& d, const std::vector<RankBuffers>& ranks,
                                        MoveList* moves) {
  const int num_ranks = static_cast<int>(ranks.size());
  const int k = d.num_updates;
  auto index = [&](int rank, int input) {
    return IndexArray(ranks[rank].inputs[input], d.index_nbytes);
  };
  for (int dst = 0; dst < num_ranks; ++dst) {
    std::vector<Arriving> arriving;
    for (int src = 0; src < num_ranks; ++src) {
      for (int j = 0; j < k; ++j) {
        const Update u = {index(src, 2)[dst * k + j], index(src, 3)[dst * k + j],
                          index(src, 4)[dst * k + j], index(dst, 5)[src * k + j]};
        if (auto failure = CheckUpdate(d, src, dst, u)) return failure;
        if (u.send_size == 0) continue;
        arriving.push_back({u.output_offset, u.send_size, src});
        moves->AddRows(Row(ranks[src].inputs[0], u.input_offset, d.row_nbytes),
                       Row(ranks[dst].outputs[0], u.output_offset, d.row_nbytes),
                       u.send_size * d.row_nbytes);
      }
    }
    std::sort(arriving.begin(), arriving.end(),
              [](const Arriving& a, const Arriving& b) { return a.begin < b.begin; });
    if (auto failure = CheckOverlap(d, dst, arriving)) return failure;
    KeepUncovered(arriving, ranks[dst].inputs[1], ranks[dst].outputs[0], d, moves);
  }
  return std::nullopt;
}

// Forward: x rows of rank s, packed by destination -> y rows of rank d, packed by source.
// Back: the same correspondence of rows, read in the other direction; rows of x that were dropped
// or are beyond the counts become zero, as their derivative is.
std::optional<Failure> BuildVariableMoves(const Description& d,
                                          const std::vector<RankBuffers>& ranks, MoveList* moves) {
  const bool back = d.motion == Motion::kVariableBack;
  const int64_t x_rows = back ? d.out_rows : d.in_rows;
  const int64_t y_rows = back ? d.in_rows : d.out_rows;
  const int num_ranks = static_cast<int>(ranks.size());
  std::vector<Counts> all;
  if (auto failure = ReadCounts(d, ranks, &all, x_rows)) return failure;

  std::vector<std::vector<Arriving>> kept(num_ranks);  // Back: rows of x with a cotangent.
  for (int dst = 0; dst < num_ranks; ++dst) {
    int64_t y_row = 0;
    for (int src = 0; src < num_ranks; ++src) {
      const int64_t wanted = all[src].count[dst];
      const int64_t count = std::min(wanted, y_rows - y_row);
      if (count < wanted && !d.drop_overflow) return Overflow(d, all, dst, y_rows);
      const int64_t x_row = all[src].offset[dst], nbytes = count * d.row_nbytes;
      if (back) {
        moves->AddRows(Row(ranks[dst].inputs[0], y_row, d.row_nbytes),
                       Row(ranks[src].outputs[0], x_row, d.row_nbytes), nbytes);
        kept[src].push_back({x_row, count, dst});
      } else {
        moves->AddRows(Row(ranks[src].inputs[0], x_row, d.row_nbytes),
                       Row(ranks[dst].outputs[0], y_row, d.row_nbytes), nbytes);
        StoreIndex(ranks[dst].outputs[1], d.index_nbytes, src, count);
        StoreIndex(ranks[dst].outputs[2], d.index_nbytes, src, wanted - count);
      }
      y_row += count;
    }
    if (!back) {
      moves->AddZero(Row(ranks[dst].outputs[0], y_row, d.row_nbytes),
                     (y_rows - y_row) * d.row_nbytes);
    }
  }
  if (!back) return std::nullopt;
  for (int src = 0; src < num_ranks; ++src) {
    KeepUncovered(kept[src], nullptr, ranks[src].outputs[0], d, moves);
  }
  return std::nullopt;
}

}  // namespace jcoll
