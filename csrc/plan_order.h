// The steps of all ranks of a plan in one order in which they can happen.
#pragma once

#include <deque>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "failure.h"
#include "plan.h"

namespace jcoll {

// Runs the ranks' steps in turn, each rank as far as it gets, and tells `visitor`:
//   Sends(step), Receives(step, sent), Local(step): each std::optional<Failure>, the first one ends
//   it
// where `sent` is the SEND that a receiving step takes its message from.
template <typename Visitor>
class PlanOrder {
 public:
  PlanOrder(const Plan& plan, Visitor* visitor)
      : plan_(plan),
        visitor_(visitor),
        next_(plan.first_step.begin(), plan.first_step.end() - 1),
        waiting_(plan.num_ranks, kNobody) {}

  std::optional<Failure> Run() {
    std::deque<int> ready;
    for (int rank = 0; rank < plan_.num_ranks; ++rank) ready.push_back(rank);
    while (!ready.empty()) {
      const int rank = ready.front();
      ready.pop_front();
      if (auto failure = RunRank(rank, &ready)) return failure;
    }
    for (int rank = 0; rank < plan_.num_ranks; ++rank) {
      if (waiting_[rank] == kNobody) continue;
      return CannotBeRun("rank " + std::to_string(rank) + " waits for a message from rank " +
                         std::to_string(waiting_[rank]) + " that is never sent");
    }
    return std::nullopt;
  }

 private:
  static constexpr int kNobody = -1;

  std::optional<Failure> RunRank(int rank, std::deque<int>* ready) {
    for (int& i = next_[rank]; i < plan_.first_step[rank + 1]; ++i) {
      const PlanStep& s = plan_.steps[i];
      std::optional<Failure> failure;
      if (s.kind == StepKind::kSend) {
        failure = visitor_->Sends(s);
        messages_[{rank, s.peer}].push_back(&s);
        if (waiting_[s.peer] == rank) {
          waiting_[s.peer] = kNobody;
          ready->push_back(s.peer);
        }
      } else if (s.kind == StepKind::kCopy || s.kind == StepKind::kReduce) {
        failure = visitor_->Local(s);
      } else {
        auto& queue = messages_[{s.peer, rank}];
        if (queue.empty()) {
          waiting_[rank] = s.peer;
          return std::nullopt;
        }
        failure = Receive(s, *queue.front());
        queue.pop_front();
      }
      if (failure) return failure;
    }
    return std::nullopt;
  }

  std::optional<Failure> Receive(const PlanStep& s, const PlanStep& sent) {
    if (s.count == sent.count) return visitor_->Receives(s, sent);
    return CannotBeRun("rank " + std::to_string(sent.rank) + " sends " +
                       std::to_string(sent.count) + " chunks where rank " + std::to_string(s.rank) +
                       " receives " + std::to_string(s.count));
  }

  const Plan& plan_;
  Visitor* const visitor_;
  std::vector<int> next_;
  std::vector<int> waiting_;                                             // For a message from whom.
  std::map<std::pair<int, int>, std::deque<const PlanStep*>> messages_;  // (sender, receiver)
};

}  // namespace jcoll
