#include "row_run.h"

#include <cstring>
#include <utility>

#include "../memory.h"

namespace jcoll {
namespace {

// Buffers of ranks that live elsewhere have no address here. The moves are made with stand-ins,
// from which rank, buffer and offset can be read again; nobody follows them.
enum StandIn : uintptr_t { kInput = 1, kBase = 2, kOutput = 3 };
constexpr int kBufferShift = 44, kRankShift = 48;

char* MakeStandIn(int rank, StandIn buffer) {
  return reinterpret_cast<char*>((static_cast<uintptr_t>(rank) + 1) << kRankShift |
                                 static_cast<uintptr_t>(buffer) << kBufferShift);
}
int RankOf(const void* p) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(p) >> kRankShift) - 1;
}
StandIn BufferOf(const void* p) {
  return static_cast<StandIn>(reinterpret_cast<uintptr_t>(p) >> kBufferShift & 0xf);
}
int64_t OffsetOf(const void* p) {
  return static_cast<int64_t>(reinterpret_cast<uintptr_t>(p) &
                              ((uintptr_t{1} << kBufferShift) - 1));
}

Key Second(const Key& key) { return MakeKey({key.hi, key.lo, 2}); }

}  // namespace

RowRun::RowRun(const Description* d, int group, RemoteRun::Setup setup)
    : d_(*d),
      group_(group),
      setup_(std::move(setup)),
      num_ranks_(static_cast<int>(setup_.process_of.size())),
      streams_(num_ranks_) {
  BeginCounts();
}

bool RowRun::IsHere(int rank) const { return setup_.process_of[rank] == World::Get()->self(); }

void RowRun::BeginCounts() {
  const int first = d_.first_index_input();
  const int64_t array_nbytes = int64_t{num_ranks_} * d_.num_updates * d_.index_nbytes;
  meta_nbytes_ = (d_.num_inputs() - first) * array_nbytes;
  own_meta_.resize(num_ranks_);
  all_meta_.resize(num_ranks_);
  meta_buffers_.resize(num_ranks_);
  for (int rank = 0; rank < num_ranks_; ++rank) {
    if (!IsHere(rank)) continue;
    for (int i = first; i < d_.num_inputs(); ++i) {
      const char* array = static_cast<const char*>(setup_.buffers[rank].inputs[i]);
      own_meta_[rank].insert(own_meta_[rank].end(), array, array + array_nbytes);
    }
    all_meta_[rank].resize(num_ranks_ * meta_nbytes_);
    meta_buffers_[rank].inputs[0] = own_meta_[rank].data();
    meta_buffers_[rank].outputs[0] = all_meta_[rank].data();
  }
  RemoteRun::Setup s = setup_;
  s.programs = d_.count_programs[group_];
  s.buffers = meta_buffers_.data();
  s.block_nbytes = meta_nbytes_;
  run_ = std::make_unique<RemoteRun>(std::move(s));
}

RemoteWork::Status RowRun::Advance() {
  const Status status = run_->Advance();
  if (has_counts_ || status != Status::kDone) return status;
  has_counts_ = true;
  all_came_ns_ = run_->all_came_ns();
  // All processes find the same mistakes: they have the same counts.
  failure_ = BeginRows();
  return failure_ ? Status::kFailed : run_->Advance();
}

std::vector<RankBuffers> RowRun::StandIns() {
  const char* meta = nullptr;
  for (int rank = 0; rank < num_ranks_; ++rank) {
    if (IsHere(rank)) meta = all_meta_[rank].data();
  }
  const int first = d_.first_index_input();
  const int64_t array_nbytes = meta_nbytes_ / (d_.num_inputs() - first);
  unread_.resize(array_nbytes);
  std::vector<RankBuffers> buffers(num_ranks_);
  for (int rank = 0; rank < num_ranks_; ++rank) {
    RankBuffers& b = buffers[rank];
    b.inputs[0] = MakeStandIn(rank, kInput);
    b.outputs[0] = MakeStandIn(rank, kOutput);
    if (first > 1) b.inputs[1] = MakeStandIn(rank, kBase);
    for (int i = first; i < d_.num_inputs(); ++i) {
      b.inputs[i] = meta + rank * meta_nbytes_ + (i - first) * array_nbytes;
    }
    for (int i = 1; i < d_.num_outputs(); ++i) {
      b.outputs[i] = IsHere(rank) ? setup_.buffers[rank].outputs[i] : unread_.data();
    }
  }
  return buffers;
}

std::optional<Failure> RowRun::BeginRows() {
  MoveList moves;
  if (auto failure = BuildMoves(d_, StandIns(), &moves)) return failure;
  rows_nbytes_ = moves.rows_nbytes();
  Sort(moves);
  RemoteRun::Setup s = setup_;
  s.key = Second(setup_.key);
  s.block_nbytes = streams_.max_nbytes();
  s.streams = &streams_;
  run_ = std::make_unique<RemoteRun>(std::move(s));
  return std::nullopt;
}

// Does what stays with its rank; the rest becomes streams, in the same order on all processes.
void RowRun::Sort(const MoveList& moves) {
  moves.ForEach([this](const void* src, void* dst, int64_t nbytes) {
    const int to = RankOf(dst);
    char* out =
        IsHere(to) ? static_cast<char*>(setup_.buffers[to].outputs[0]) + OffsetOf(dst) : nullptr;
    if (src == nullptr) {
      if (out != nullptr) Zero(out, nbytes, /*stream=*/false);
      return;
    }
    const int from = RankOf(src);
    const int input = BufferOf(src) == kInput ? 0 : 1;
    const char* in = nullptr;
    if (IsHere(from)) {
      in = static_cast<const char*>(setup_.buffers[from].inputs[input]) + OffsetOf(src);
    }
    if (from != to) {
      streams_.Add(from, to, in, out, nbytes);
    } else if (out != nullptr && in != out) {
      std::memcpy(out, in, static_cast<size_t>(nbytes));
    }
  });
}

}  // namespace jcoll
