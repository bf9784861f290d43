// One collective whose ranks live in several processes of this host, as one process runs it.
//
// Every process of the group posts what it is about to do, and compares another's signature with
// its own before it looks at its data, so that ranks that disagree get an error before data are
// mixed. Every local rank runs its program (program.h) as far as it can, which before the others
// have come is what they need of it. It goes lane by lane: lane l is the l-th range of bytes of
// every chunk. `kCursors` lanes are in flight at once, each in its own part of the staging area, so
// that a rank writes the next lane while its peers read the last. Memory is bounded, whatever the
// size.
//
// Counters, one pair for each local rank and cursor, only ever grow:
//   sent  messages that are in the slots, over all rounds of the cursor
//   done  rounds that the rank has finished: it reads no slot of earlier rounds any more
// A rank begins a round when all who read its slots have done the round before.
//
// Large collectives whose processes map each other's buffers (peer_heap.h), or may read them
// (peer_reads.h), do without most slots: a rank *exposes* its buffers, i.e. leaves what it would
// stage where it is (RankProgram::origins), and the receivers take it from there. It then keeps its
// buffers until all receivers have done all rounds.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "../chunk_cuts.h"
#include "../moves.h"
#include "../reduce.h"
#include "program.h"
#include "remote_work.h"
#include "streams.h"
#include "world.h"

namespace jcoll {

// What a call is to other processes; fixed when its program is loaded.
struct RemoteName {
  std::string where;       // The first part of every error.
  std::string call;        // What is called,
  std::string site;        // and where it was written: " called at ...", or nothing.
  uint64_t signature = 0;  // A hash of what must be the same on all ranks.
  uint64_t program = 0;    // A hash of the program's name.
};

class RemoteRun : public RemoteWork {
 public:
  static constexpr int kCursors = 2;

  struct Setup {
    std::shared_ptr<const PlanPrograms> programs;
    Key key;
    const RemoteName* name = nullptr;      // Outlives the run.
    std::vector<int> process_of;           // By rank, as World counts them.
    uint64_t members = 0;                  // A hash of the ranks' processes and devices, in order.
    const RankBuffers* buffers = nullptr;  // By rank; those of other processes are not looked at.
    int64_t block_nbytes = 0;
    int64_t buffers_nbytes = 0;  // Operands and results of all ranks together.
    // Where blocks are not of one size: block b of rank r's input is the stream from r to b, block
    // b of its output the one from b to r, and block_nbytes the length of the longest.
    const Streams* streams = nullptr;
    ReduceFn reduce = nullptr;
    int64_t element_nbytes = 1;
    double timeout_s = 0;
    int64_t opened_ns = 0;
    std::string refusal;  // Not empty: it fails with this, here and for all others.
  };
  explicit RemoteRun(Setup setup);

  Status Advance() override;
  Status CheckHealth(int64_t now_ns) override;
  bool moved() const override { return moved_; }
  const Failure& failure() const override { return *failure_; }
  int64_t all_came_ns() const override { return all_came_ns_; }
  int64_t mapped_nbytes() const override { return mapped_nbytes_; }

 private:
  struct Counter {
    alignas(64) std::atomic<uint64_t> sent;
    alignas(64) std::atomic<uint64_t> done;
  };
  enum class Exposure : uint32_t {
    kNone,
    kRead,    // Receivers copy what they need from this process's memory (peer_reads.h).
    kMapped,  // They have it mapped (peer_heap.h).
  };
  // In the arena, after the counters: where a rank's buffers are in its process, if it exposes
  // them.
  struct Exposed {
    const char* input;
    const char* output;
    Exposure how;
  };
  struct Cursor {
    int rank, index;  // `index` of kCursors.
    int64_t round = 0, num_rounds = 0;
    size_t action = 0;
    bool has_begun = false;  // The round's slots may be written.
  };

  Exposure ChooseExposure() const;
  bool MayExpose(bool (World::*may)(int) const) const;
  void Announce();
  bool GetReady();
  void LookForArrivals();
  bool HasArrived(int process);
  // What others need of our ranks is made before they come; what they have is looked at afterwards.
  bool HasCome(int rank) const {
    const int process = s_.process_of[rank];
    return process == world_->self() || posts_[process] != nullptr;
  }
  Status Mismatch(int process, const std::string& call, const Key& conflict = {});
  Status FailLike(int process);
  bool Step(Cursor* cursor);
  bool MayBegin(const Cursor& cursor);
  bool ReceiversHaveDone(const Cursor& cursor);
  bool HasDone(int receiver, const Cursor& cursor);
  bool IsReady(const Cursor& cursor, const RankProgram::Action& action);
  bool HasSent(const RankProgram::Operand& src, const Cursor& cursor);
  bool Run(const Cursor& cursor, const RankProgram::Action& action);
  bool Move(const Cursor& cursor, const RankProgram::Action& action, const ChunkCuts::Range& range);
  void MoveStream(const Cursor& cursor, const RankProgram::Action& action, int64_t begin);
  const char* Source(const Cursor& cursor, const RankProgram::Operand& src, int64_t begin,
                     int64_t nbytes, char* fetched);
  const RankProgram::Origin* OriginOf(int rank, int32_t slot);
  bool UsesSlots(int rank);
  bool IsInPeer(const RankProgram::Operand& src);
  bool IsRead(const RankProgram::Operand& src) {
    return IsInPeer(src) && ExposedOf(src.rank)->how == Exposure::kRead;
  }
  const char* AddressOf(const RankProgram::Operand& src, int64_t begin);
  bool HasHeld(const RankProgram::Operand& src);
  bool Read(const RankProgram::Operand& src, int64_t begin, int64_t nbytes, void* to);
  char* Local(const Cursor& cursor, PlanBuffer buffer, int chunk, int64_t begin);
  // A rank and cursor's number among its process's: of counters, slots and scratch.
  int64_t AreaOf(int rank, int cursor) const {
    return int64_t{local_index_[rank]} * kCursors + cursor;
  }
  char* Arena(int process);
  char* Slot(int rank, int cursor, int slot);
  Counter* CounterOf(int rank, int cursor);
  Exposed* ExposedOf(int rank);
  int64_t HeadNbytes(int process) const;
  void RingPeers();
  void Finish();
  Status Fail(FailureCode code, const std::string& why);
  Status FailWith(Failure failure, const std::string& cause, const Key& conflict = {});
  Status FailByDeadline(int64_t now_ns);
  bool WillNotCome(int process);
  bool IsIdle(int process, int64_t now_ns) const;
  std::string RanksOf(int process) const;
  std::string Laggards();
  std::string DeadlineText();

  Setup s_;
  World* const world_;
  std::vector<int> local_index_;  // By rank: its number among its process's ranks of the group.
  std::vector<int> num_local_;    // By process: ranks of the group.
  std::vector<Post*> posts_;      // By process, held; null: not seen yet, or not of the group.
  Post* own_ = nullptr;
  int num_missing_ = 0;  // Processes that have not arrived.
  int64_t all_came_ns_ = 0;
  int64_t mapped_nbytes_ = 0;
  ChunkCuts cuts_;
  int64_t lane_nbytes_ = 0;
  bool stream_ = false;
  Exposure exposure_ = Exposure::kNone;  // Of our ranks' buffers.
  int64_t arena_offset_ = -1, arena_nbytes_ = 0;
  static constexpr uint64_t kNoTicket = UINT64_MAX;
  uint64_t ticket_ = kNoTicket;  // For the arena.
  std::vector<Cursor> cursors_;
  std::vector<char> scratch_;
  std::vector<char> fetched_;  // What an action has read from peers' memory.
  size_t cursors_left_ = 0;
  bool moved_ = false;
  std::optional<Failure> failure_;
};

}  // namespace jcoll
