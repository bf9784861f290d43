// The ragged collectives over several processes: first all ranks learn all counts and offsets, then
// every pair of ranks exchanges its rows.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "../description.h"
#include "remote_run.h"

namespace jcoll {

class RowRun : public RemoteWork {
 public:
  // `setup` as for a RemoteRun, but for reduce and block_nbytes. Its programs are those of an
  // all_to_all of whole blocks.
  RowRun(const Description* d, int group, RemoteRun::Setup setup);

  Status Advance() override;
  Status CheckHealth(int64_t now_ns) override { return run_->CheckHealth(now_ns); }
  bool moved() const override { return run_->moved(); }
  int64_t rows_nbytes() const override { return rows_nbytes_; }
  const Failure& failure() const override { return failure_ ? *failure_ : run_->failure(); }
  int64_t all_came_ns() const override {
    return all_came_ns_ > 0 ? all_came_ns_ : run_->all_came_ns();
  }

 private:
  bool IsHere(int rank) const;
  void BeginCounts();
  std::optional<Failure> BeginRows();
  std::vector<RankBuffers> StandIns();
  void Sort(const MoveList& moves);

  const Description& d_;
  const int group_;
  const RemoteRun::Setup setup_;
  const int num_ranks_;
  int64_t meta_nbytes_ = 0;
  std::vector<std::vector<char>> own_meta_, all_meta_;  // By rank; of this process's ranks.
  std::vector<RankBuffers> meta_buffers_;
  std::vector<char> unread_;  // Where counts for other processes' ranks are written.
  Streams streams_;
  int64_t rows_nbytes_ = 0;
  bool has_counts_ = false;
  int64_t all_came_ns_ = 0;  // With their counts.
  std::unique_ptr<RemoteRun> run_;
  std::optional<Failure> failure_;
};

}  // namespace jcoll
