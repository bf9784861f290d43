// The processes of one host that run collectives with each other, as one of them sees them.
//
// Every process owns a segment that all others map:
//
//   Header   is it alive, does it sleep, how to wake it
//   Post[]   the collectives it takes part in now: its signature for each, and where its data are
//   arena    counters and staging areas of the posts
//
// A process writes to its own segment only, but for three things: a doorbell that wakes its owner,
// and the count of the readers that a post still has. A post is identified by a 128-bit key that
// all processes derive alike (Collective::KeyOf), and is looked up in a small window of the table.
//
// Memory order. Everything in a post is written before `state` is stored (release) and read after
// it has been loaded (acquire). Sleeping: the sleeper stores `sleeping`, then looks for news, then
// waits on the doorbell; the waker stores its news, then loads `sleeping`. Both pairs are
// sequentially consistent, so that at least one of them sees the other.
#pragma once

#include <atomic>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "segment.h"

namespace jcoll {

struct Key {
  uint64_t hi = 0, lo = 0;
  bool operator==(const Key& other) const { return hi == other.hi && lo == other.lo; }
};

// A key from what names a collective.
Key MakeKey(std::initializer_list<uint64_t> parts);

enum class PostState : uint32_t {
  kFree,
  kOpen,    // Its counters and staging areas are not there yet.
  kReady,   // They are.
  kFailed,  // `error` says why.
};

struct Post {
  std::atomic<uint64_t> key_hi, key_lo;
  std::atomic<PostState> state;
  std::atomic<int32_t> readers_left;  // Processes that have not let go of it.
  std::atomic<int64_t> opened_ns;     // CLOCK_MONOTONIC, which processes of a host share.
  std::atomic<int64_t> failed_ns;
  std::atomic<uint64_t> members;      // Which ranks and which processes: a hash.
  std::atomic<uint64_t> signature;    // What is called: a hash.
  std::atomic<int64_t> arena_offset;  // Of the counters; the staging areas follow.
  char call[384];                     // What is called, for people, and where.
  char error[1024];                   // Why it failed.
};

enum class ProcessState : uint32_t { kStarting, kAlive, kLeaving };

struct Header {
  uint64_t magic;
  std::atomic<ProcessState> state;
  std::atomic<uint32_t> doorbell;
  std::atomic<uint32_t> sleeping;
  std::atomic<int64_t> idle_since_ns;  // The process has used next to no CPU since; 0: it is busy.
  const uint64_t* probe;               // See ReadProbe.
  std::atomic<bool> reads_peers;       // It has joined, and may read the memory of all others.
  char reason[400];                    // Why it leaves.
};

// What the bootstrap has exchanged about every process.
struct ProcessInfo {
  int pid = 0, fd = -1;
  int64_t nbytes = 0;
  int id = 0;  // JAX's process index, which errors name; a World counts its processes from 0.
};

class World {
 public:
  static constexpr int kMaxPosts = 1024;
  static constexpr int kWindow = 32;

  // Makes this process's segment. `arena_nbytes`: JCOLL_SHM_SIZE.
  static std::optional<Failure> Prepare(int64_t arena_nbytes, ProcessInfo* info);
  // Blocks of so many bytes or more are read in the memory of peers (peer_reads.h), where processes
  // may; 0: none are. JCOLL_PEER_READS. Before Join.
  static void SetPeerReads(int64_t min_nbytes);
  static int64_t PeerReads();
  // Maps the others'. `infos` by process, this one's at `self`. Called once.
  static std::optional<Failure> Join(int self, const std::vector<ProcessInfo>& infos);
  // Null before Join.
  static World* Get();

  int self() const { return self_; }
  int num_processes() const { return static_cast<int>(peers_.size()); }
  // The process with a JAX process index; -1 if it is not of this host.
  int ProcessOf(int64_t id) const;
  std::string NameOf(int process) const { return "process " + std::to_string(peers_[process].id); }
  int PidOf(int process) const { return peers_[process].pid; }
  // Whether a process may read the memory of all others.
  bool ReadsPeers(int process) const { return header(process)->reads_peers.load(); }

  // This process's posts.
  Post* OpenPost(const Key& key, uint64_t members, uint64_t signature, int num_readers,
                 const std::string& call);
  void Fail(Post* post, const std::string& why);
  // Lets go of a post when all readers have; see Sweep.
  void Retire(Post* post, int64_t arena_offset, int64_t arena_nbytes);
  // Memory is given in the order of tickets, as all processes would: two that took turns in another
  // order could each hold what the other's next collective needs.
  uint64_t TakeTicket();
  // -1 if there is not so much left yet, or if an earlier ticket still waits.
  int64_t Allocate(int64_t nbytes, uint64_t ticket);
  // The holder of a ticket does not want memory any more.
  void ForgetTicket(uint64_t ticket);
  int64_t arena_nbytes() const;

  // Another process's post for a key; null if it has not come yet.
  Post* Find(int process, const Key& key) const;
  // A post of another process and the same members that this process takes no part in, though it
  // has waited under `key` since `since_ns`: one that has failed meanwhile, or, if `waits`, one
  // that has waited for a second itself.
  Post* FindConflict(int process, const Key& key, uint64_t members, int64_t since_ns,
                     int64_t now_ns, bool waits) const;
  // A conflict has been found and told: what peers had open until now belongs to it.
  void SettleConflicts(int64_t now_ns) { settled_ns_.store(now_ns); }
  char* At(int process, int64_t arena_offset) const;

  // Tells processes that there is news.
  void Ring(int process);
  void RingAll();
  // Sleeps until somebody rings, at most `ns`. `has_news` is asked once more before.
  template <typename Fn>
  void Sleep(int64_t ns, Fn has_news) {
    Header* h = header(self_);
    const uint32_t seen = h->doorbell.load();
    h->sleeping.store(1);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (!has_news()) WaitForDoorbell(seen, ns);
    h->sleeping.store(0);
  }

  // "" if a process lives; else what became of it.
  std::string Fate(int process);
  // This process goes: collectives of others that wait for it fail with the reason.
  void Leave(const std::string& reason);
  // Keeps idle_since_ns up to date; called now and then by the progress thread.
  void WatchIdleness(int64_t now_ns);
  int64_t IdleSince(int process) const { return header(process)->idle_since_ns.load(); }

 private:
  struct Retired {
    Post* post;
    int64_t offset, nbytes;
  };
  struct Free {
    int64_t offset, nbytes;
  };
  World() = default;
  Header* header(int process) const;
  Post* posts(int process) const;
  void WaitForDoorbell(uint32_t seen, int64_t ns);
  void SweepLocked();
  void ReleaseLocked(int64_t offset, int64_t nbytes);
  bool IsDead(int process);

  int self_ = 0;
  std::vector<std::unique_ptr<Segment>> segments_;  // By process.
  std::vector<ProcessInfo> peers_;
  std::vector<int> pidfds_;

  std::atomic<int64_t> settled_ns_{0};
  std::mutex mu_;
  std::vector<Retired> retired_;  // Oldest first.
  std::vector<Free> free_;        // By offset; neighbours are joined.
  uint64_t next_ticket_ = 0;
  std::set<uint64_t> waiting_;
  int64_t cpu_ns_ = 0, cpu_checked_ns_ = 0;
};

int64_t MonotonicNs();

}  // namespace jcoll
