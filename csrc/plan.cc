#include "plan.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace jcoll {
namespace {

constexpr int32_t kMagic = 'J' | 'C' << 8 | 'P' << 16 | 'L' << 24;
constexpr int32_t kVersion = 1;
constexpr int64_t kMaxRanks = 1 << 20;
// Of all ranks together: what keeps track of them takes some bytes for each.
constexpr int64_t kMaxChunks = 1 << 26;

// As in jcoll/plan/encode.py.
struct Header {
  int32_t magic, version, num_words, op, num_ranks, root, chunks_per_block, num_scratch, num_steps,
      name_words;
};

Failure Malformed(const std::string& what) {
  return {FailureCode::kInvalidArgument, "jcoll: the encoded plan is malformed: " + what +
                                             ".\n  It is cut off, damaged or of " +
                                             "another version of jcoll."};
}

bool InputPerRank(PlanOp op) {
  return op == PlanOp::kReduceScatter || op == PlanOp::kAllToAll || op == PlanOp::kScatter;
}
bool OutputPerRank(PlanOp op) {
  return op == PlanOp::kAllGather || op == PlanOp::kAllToAll || op == PlanOp::kGather;
}

std::optional<Failure> CheckHeader(const Header& h, int64_t num_words) {
  if (h.magic != kMagic) return Malformed("it does not begin like a plan");
  if (h.version != kVersion) return Malformed("version " + std::to_string(h.version));
  if (h.op < 0 || h.op > static_cast<int32_t>(PlanOp::kScatter)) return Malformed("unknown op");
  if (h.num_ranks < 1 || h.num_ranks > kMaxRanks || h.root < 0 || h.root >= h.num_ranks ||
      h.chunks_per_block < 1 || h.num_scratch < 0 || h.num_steps < 0 || h.name_words < 0) {
    return Malformed("a number of the header is out of range");
  }
  const auto op = static_cast<PlanOp>(h.op);
  const int64_t blocks =
      (InputPerRank(op) ? h.num_ranks : 1) + (OutputPerRank(op) ? h.num_ranks : 1);
  const int64_t chunks_per_rank = blocks * h.chunks_per_block + h.num_scratch;
  if (chunks_per_rank > kMaxChunks / h.num_ranks) return Malformed("it has too many chunks");
  const int64_t words = int64_t{sizeof(Header) / 4} + h.name_words + h.num_ranks + 1 +
                        int64_t{h.num_steps} * int64_t{sizeof(PlanStep) / 4};
  if (words != num_words || words != h.num_words) return Malformed("its length is wrong");
  return std::nullopt;
}

bool IsInside(const Plan& plan, PlanBuffer buffer, int32_t chunk, int32_t count) {
  return buffer >= PlanBuffer::kInput && buffer <= PlanBuffer::kScratch && chunk >= 0 &&
         int64_t{chunk} + count <= plan.num_chunks(buffer);
}

bool IsValid(const Plan& plan, int rank, const PlanStep& s) {
  if (s.rank != rank || s.count < 1) return false;
  if (s.kind < StepKind::kSend || s.kind > StepKind::kReduce) return false;
  const bool has_peer = s.kind <= StepKind::kRecvReduce;
  if (has_peer && (s.peer < 0 || s.peer >= plan.num_ranks || s.peer == rank)) return false;
  const bool reads = s.kind != StepKind::kRecv, writes = s.kind != StepKind::kSend;
  if (reads && !IsInside(plan, s.src_buffer, s.src_chunk, s.count)) return false;
  if (!writes) return true;
  return s.dst_buffer != PlanBuffer::kInput && IsInside(plan, s.dst_buffer, s.dst_chunk, s.count);
}

std::optional<Failure> CheckSteps(const Plan& plan) {
  if (plan.first_step.front() != 0 ||
      plan.first_step.back() != static_cast<int32_t>(plan.steps.size())) {
    return Malformed("its ranks do not cover its steps");
  }
  for (int rank = 0; rank < plan.num_ranks; ++rank) {
    const int32_t begin = plan.first_step[rank], end = plan.first_step[rank + 1];
    if (begin > end) return Malformed("its ranks are out of order");
    for (int32_t i = begin; i < end; ++i) {
      if (IsValid(plan, rank, plan.steps[i])) continue;
      return Malformed("step " + std::to_string(i - begin) + " of rank " + std::to_string(rank));
    }
  }
  return std::nullopt;
}

}  // namespace

int Plan::in_blocks() const { return InputPerRank(op) ? num_ranks : 1; }
int Plan::out_blocks() const { return OutputPerRank(op) ? num_ranks : 1; }

int Plan::num_chunks(PlanBuffer buffer) const {
  switch (buffer) {
    case PlanBuffer::kInput:
      return in_blocks() * chunks_per_block;
    case PlanBuffer::kOutput:
      return out_blocks() * chunks_per_block;
    case PlanBuffer::kScratch:
      break;
  }
  return num_scratch;
}

PlanShape Plan::shape() const {
  const bool reduces = std::any_of(steps.begin(), steps.end(), [](const PlanStep& s) {
    return s.kind == StepKind::kRecvReduce || s.kind == StepKind::kReduce;
  });
  return {num_ranks, chunks_per_block, in_blocks(), out_blocks(), num_scratch, reduces};
}

Failure CannotBeRun(const std::string& why) {
  return {FailureCode::kInvalidArgument, "jcoll: a plan cannot be run: " + why + "."};
}

Failure CannotBeRun(int rank, PlanBuffer buffer, int chunk, const std::string& what) {
  static constexpr const char* kNames[] = {"input", "output", "scratch"};
  return CannotBeRun("rank " + std::to_string(rank) + "'s " + kNames[static_cast<int>(buffer)] +
                     "[" + std::to_string(chunk) + "] " + what);
}

std::optional<Failure> DecodePlan(const void* data, int64_t nbytes, Plan* plan) {
  Header h;
  if (nbytes < static_cast<int64_t>(sizeof(h))) return Malformed("it is too short");
  std::memcpy(&h, data, sizeof(h));
  if (nbytes % 4 != 0) return Malformed("it is not made of words");
  if (auto failure = CheckHeader(h, nbytes / 4)) return failure;

  const char* next = static_cast<const char*>(data) + sizeof(h);
  auto take = [&next](void* out, size_t n) {
    if (n > 0) std::memcpy(out, next, n);
    next += n;
  };
  Plan p;
  p.op = static_cast<PlanOp>(h.op);
  p.num_ranks = h.num_ranks;
  p.root = h.root;
  p.chunks_per_block = h.chunks_per_block;
  p.num_scratch = h.num_scratch;
  p.algorithm.resize(size_t{4} * h.name_words);
  take(&p.algorithm[0], p.algorithm.size());
  p.algorithm.resize(std::strlen(p.algorithm.c_str()));
  p.first_step.resize(h.num_ranks + 1);
  take(p.first_step.data(), p.first_step.size() * 4);
  p.steps.resize(h.num_steps);
  take(p.steps.data(), p.steps.size() * sizeof(PlanStep));
  if (auto failure = CheckSteps(p)) return failure;
  *plan = std::move(p);
  return std::nullopt;
}

}  // namespace jcoll
