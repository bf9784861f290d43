#include "cuda/ffi/communicator.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

namespace jcoll::gpu {
namespace {

using Clock = std::chrono::steady_clock;

// Polls, as neither NCCL nor a stream can be waited for with a deadline.
class Deadline {
 public:
  explicit Deadline(double timeout_s)
      : end_(Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                std::chrono::duration<double>(timeout_s))) {}
  // Sleeps for a moment; false once the time is over.
  bool Sleep() const {
    if (Clock::now() >= end_) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(20));
    return true;
  }

 private:
  Clock::time_point end_;
};

Failure Late(const std::string& what, double timeout_s) {
  char seconds[32];
  std::snprintf(seconds, sizeof(seconds), "%g", timeout_s);
  return {FailureCode::kDeadlineExceeded,
          "jcoll: " + what + " was not over after " + seconds +
              " s: some rank of the group does not take part.\n  Look at the ranks' logs; raise "
              "timeout_s if one is only slow."};
}

// How a rank is, so that it fits into an exchange.
struct Verdict {
  static constexpr Topic kTopic = Topic::kVerdict;
  int32_t is_well;
  int32_t code;
  char text[240];
};

const char* Name(Topic topic) {
  switch (topic) {
    case Topic::kVerdict:
      return "whether all is well";
    case Topic::kRankFacts:
      return "what they can do";
    case Topic::kReach:
      return "whom they reach";
    case Topic::kAnnouncement:
      return "their next collective";
  }
  return "something unknown";
}

}  // namespace

std::variant<std::unique_ptr<Communicator>, Failure> Communicator::Open(const nccl::Api* api,
                                                                        nccl::Comm* comm) {
  std::unique_ptr<Communicator> opened(new Communicator(api, comm));
  if (auto failure = opened->Mark()) return *failure;
  return opened;
}

std::optional<Failure> Communicator::SetUp(int num_ranks) {
  auto failure = ReadRank(num_ranks);
  return failure ? failure : Allocate();
}

std::optional<Failure> Communicator::ReadRank(int expected_ranks) {
  constexpr double kAtOnce = 10;
  auto failure = Check("ncclCommCount", api_->CommCount(comm_, &num_ranks_), kAtOnce);
  if (failure) return failure;
  failure = Check("ncclCommUserRank", api_->CommUserRank(comm_, &rank_), kAtOnce);
  if (failure) return failure;
  if (num_ranks_ == expected_ranks && rank_ >= 0 && rank_ < num_ranks_) return std::nullopt;
  return Failure{FailureCode::kInternal,
                 "jcoll: XLA gave a communicator of " + std::to_string(num_ranks_) +
                     " ranks, where this is rank " + std::to_string(rank_) + ", for a group of " +
                     std::to_string(expected_ranks) +
                     ".\n  This jaxlib is not one that jcoll knows; use algorithm=\"xla\"."};
}

// NCCL lets nobody put a name on a communicator that is borrowed. But it numbers the reductions
// that users make per communicator, and refuses to destroy one that it does not know: a reduction
// that is there is a mark. Nobody reduces by it.
std::optional<Failure> Communicator::Mark() {
  int32_t one = 1;
  const nccl::Result result =
      api_->RedOpCreatePreMulSum(&mark_, &one, nccl::kInt32, nccl::kScalarHostImmediate, comm_);
  auto failure = Check("ncclRedOpCreatePreMulSum", result, /*timeout_s=*/10);
  if (failure) mark_ = nccl::kSum;
  return failure;
}

bool Communicator::IsSame() {
  if (mark_ == nccl::kSum || api_->RedOpDestroy(mark_, comm_) != nccl::kSuccess) return false;
  return !Mark();
}

std::optional<Failure> Communicator::Allocate() {
  const size_t nbytes = (1 + static_cast<size_t>(num_ranks_)) * sizeof(Message);
  void *host = nullptr, *alias = nullptr, *memory = nullptr;
  if (auto failure = device::AllocateHost(nbytes, &host, &alias)) return failure;
  if (auto failure = device::Allocate(nbytes, &memory)) return failure;
  if (auto failure = device::Allocate(sizeof(int32_t), &word_)) return failure;
  if (auto failure = device::NewStream(&stream_)) return failure;
  host_ = static_cast<Message*>(host);
  device_ = static_cast<Message*>(memory);
  return device::Zero(word_, sizeof(int32_t), stream_);
}

std::optional<Failure> Communicator::Check(const char* what, nccl::Result result,
                                           double timeout_s) const {
  const Deadline deadline(timeout_s);
  while (result == nccl::kInProgress) {
    if (api_->CommGetAsyncError(comm_, &result) != nccl::kSuccess) break;
    if (result == nccl::kInProgress && !deadline.Sleep()) return Late(what, timeout_s);
  }
  if (result == nccl::kSuccess) return std::nullopt;
  return Failure{FailureCode::kInternal, std::string("jcoll: ") + what + " of NCCL " +
                                             nccl::VersionText(api_->version) +
                                             " failed: " + api_->GetErrorString(result) +
                                             ".\n  Set NCCL_DEBUG=WARN to see why."};
}

std::optional<Failure> Communicator::WaitForStream(double timeout_s, bool asks_nccl) const {
  const Deadline deadline(timeout_s);
  for (;;) {
    bool is_done = false;
    if (auto failure = device::IsDone(stream_, &is_done)) return failure;
    if (is_done) return std::nullopt;
    nccl::Result error = nccl::kSuccess;  // A peer that died never comes.
    if (asks_nccl && api_->CommGetAsyncError(comm_, &error) == nccl::kSuccess &&
        error != nccl::kInProgress) {
      if (auto failure = Check("an exchange", error, timeout_s)) return failure;
    }
    if (!deadline.Sleep()) return Late("what the ranks tell each other at first", timeout_s);
  }
}

std::optional<Failure> Communicator::ExchangeMessages(const Message& mine, double timeout_s) {
  if (broken_) return broken_;
  ++num_exchanges_;
  broken_ = Gather(mine, timeout_s);
  for (int rank = 0; rank < num_ranks_ && !broken_; ++rank) {
    const Head& head = host_[1 + rank].head;
    if (head.number == mine.head.number && head.topic == mine.head.topic) continue;
    broken_ = Failure{FailureCode::kInternal,
                      "jcoll: the ranks of a communicator are out of step: rank " +
                          std::to_string(rank) + " tells " + Name(head.topic) + " (exchange " +
                          std::to_string(head.number) + "), and rank " + std::to_string(rank_) +
                          " " + Name(mine.head.topic) + " (" + std::to_string(mine.head.number) +
                          ").\n  All processes must run the same programs in the same order, and "
                          "end together where one has failed."};
  }
  return broken_;
}

std::optional<Failure> Communicator::Gather(const Message& mine, double timeout_s) {
  host_[0] = mine;
  if (auto failure = device::Copy(device_, host_, sizeof(Message), stream_)) return failure;
  const nccl::Result result =
      api_->AllGather(device_, device_ + 1, sizeof(Message), nccl::kUint8, comm_, stream_);
  if (auto failure = Check("ncclAllGather", result, timeout_s)) return failure;
  auto failure = device::Copy(host_ + 1, device_ + 1, sizeof(Message) * num_ranks_, stream_);
  return failure ? failure : WaitForStream(timeout_s, /*asks_nccl=*/true);
}

std::variant<void*, Failure> Communicator::Upload(const std::vector<int32_t>& words,
                                                  double timeout_s) {
  const size_t nbytes = words.size() * sizeof(int32_t);
  void* memory = nullptr;
  if (auto failure = device::Allocate(nbytes, &memory)) return *failure;
  if (auto failure = device::Copy(memory, words.data(), nbytes, stream_)) return *failure;
  if (auto failure = WaitForStream(timeout_s, /*asks_nccl=*/false)) return *failure;
  return memory;
}

std::optional<Failure> Communicator::Download(void* host, const void* memory, size_t nbytes,
                                              double timeout_s) {
  if (broken_) return broken_;  // What is in flight may never end.
  auto failure = device::Copy(host, memory, nbytes, stream_);
  return failure ? failure : WaitForStream(timeout_s, /*asks_nccl=*/false);
}

std::optional<Failure> Communicator::AllWell(const std::optional<Failure>& mine, double timeout_s) {
  Verdict verdict = {};
  verdict.is_well = !mine;
  if (mine) {
    verdict.code = static_cast<int32_t>(mine->code);
    mine->message.copy(verdict.text, sizeof(verdict.text) - 1);
  }
  auto exchanged = Exchange(verdict, timeout_s);
  if (auto* failure = std::get_if<Failure>(&exchanged)) return *failure;
  const auto& all = std::get<std::vector<Verdict>>(exchanged);
  const auto ill =
      std::find_if(all.begin(), all.end(), [](const Verdict& v) { return !v.is_well; });
  if (ill == all.end()) return std::nullopt;
  const int rank = static_cast<int>(ill - all.begin());
  const std::string text = rank == rank_ ? mine->message : ill->text;  // Not cut to length here.
  return Failure{static_cast<FailureCode>(ill->code),
                 "on rank " + std::to_string(rank) + ": " + text};
}

}  // namespace jcoll::gpu
