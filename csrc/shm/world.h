// The processes of one host that run collectives with each other, as one of them sees them.
//
// Every process owns a segment that all others map:
//
//   Header   is it alive, does it sleep, how to wake it
//   Post[]   the collectives it takes part in: its signature for each, and where its data are
//   arena    counters and staging areas of the posts
//
// A process writes to its own segment only, but for these: a doorbell that wakes its owner, who
// still awaits or holds a post (post.h), and, in that of process 0, on which cores processes wait
// (core_sharing.h). A post is identified by a 128-bit key that all processes
// derive alike (Collective::RemoteSetup), and is looked up in a small window of the table.
//
// Sleeping: the sleeper stores `sleeping`, then looks for news, then waits on the doorbell; the
// waker stores its news, then loads `sleeping`. Both are sequentially consistent, so that at least
// one of them sees the other.
#pragma once

#include <sched.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "../heap/heap_range.h"
#include "core_sharing.h"
#include "peer_heap.h"
#include "post.h"
#include "segment.h"

namespace jcoll {

enum class ProcessState : uint32_t { kStarting, kAlive, kLeaving };

// Drawn by the maker of a segment: whose it is cannot be told by a process's number and that of a
// file, which are reused, and which two containers may have in common.
using Nonce = std::array<uint64_t, 2>;

struct Header {
  uint64_t magic;
  Nonce nonce;
  std::atomic<ProcessState> state;
  std::atomic<uint32_t> doorbell;
  std::atomic<uint32_t> sleeping;
  std::atomic<int64_t> idle_since_ns;  // The process has used next to no CPU since; 0: it is busy.
  const uint64_t* probe;               // See ReadProbe.
  std::atomic<bool> reads_peers;       // It has joined, and may read the memory of all others.
  HeapPlace heap;                      // Where buffers that others may map are.
  std::atomic<bool> maps_heaps;        // It has joined, and maps those of all others.
  SharedText<400> reason;              // Why it leaves; before `state`.
  cpu_set_t allowed_cores;
  CoreSharing::Slot cores[CoreSharing::kMaxCores];  // Those of process 0 are everybody's.
};

// What the bootstrap has exchanged about every process.
struct ProcessInfo {
  int pid = 0, fd = -1;
  int64_t nbytes = 0;
  Nonce nonce = {};
  int id = 0;  // JAX's process index, which errors name; a World counts its processes from 0.
};

class World {
 public:
  static constexpr int kMaxPosts = 1024;
  static constexpr int kWindow = 32;
  // Of a window, for those only that say why they have failed.
  static constexpr int kReserve = 4;

  // Makes this process's segment. `arena_nbytes`: JCOLL_SHM_SIZE.
  static std::optional<Failure> Prepare(int64_t arena_nbytes, ProcessInfo* info);
  // Blocks of so many bytes or more are read in the memory of peers (peer_reads.h), where processes
  // may; 0: none are. JCOLL_PEER_READS. Before Join.
  static void SetPeerReads(int64_t min_nbytes);
  static int64_t PeerReads();
  // This process's shared heap; null: none. Before Prepare.
  static void SetHeap(const HeapRange* heap);
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
  // Whether a process maps the shared heaps of all others, as far as they have some.
  bool MapsHeaps(int process) const { return header(process)->maps_heaps.load(); }
  // Whether an address of this process is in its shared heap.
  bool IsInHeap(const void* p) const { return header(self_)->heap.Has(p); }
  // Where the memory at an address in another process's heap is here.
  const char* InHeapOf(int process, const char* address) const {
    return heaps_[process].At(address);
  }

  // What this process is about to do; null if the key's window is full. `num_ranks`, by process:
  // who has some will come for it. `as_failed`: it has room where others have not; Fail is to
  // follow.
  Post* OpenPost(const Key& key, uint64_t members, uint64_t signature,
                 const std::vector<int>& num_ranks, const std::string& call,
                 const std::string& site, bool as_failed);
  // `conflict`: the collective that others made instead, if that is why.
  void Fail(Post* post, const std::string& why, const Key& conflict = {});
  // The collective is over; a part of the arena is given back with its post (none: 0 bytes). See
  // Sweep.
  void Retire(Post* post, int64_t arena_offset, int64_t arena_nbytes);
  // Memory is given in the order of tickets, i.e. in which this process's ranks have come. Where
  // all processes come to their collectives in one order, they take turns in it, too. Where they do
  // not, and memory is short, two may each hold what the other's next collective needs: that ends
  // at the deadline (RemoteRun::DeadlineText).
  uint64_t TakeTicket();
  // -1 if there is not so much left yet, or if an earlier ticket still waits.
  int64_t Allocate(int64_t nbytes, uint64_t ticket);
  // The holder of a ticket does not want memory any more.
  void ForgetTicket(uint64_t ticket);
  int64_t arena_nbytes() const;

  // Another process's post for a key, for a glance; null if it has not come yet.
  Post* Find(int process, const Key& key) const;
  // The same, if it is kReady or later, held by this process. Its state is to be read afterwards.
  Post* FindAndHold(int process, const Key& key) const;
  // A collective of another process and the same members that this process takes no part in, though
  // it has waited under `key` since `since_ns`: one that has failed meanwhile, or, if `waits`, one
  // that waits itself, since before `until_ns`. What has been told does not count again for who
  // begins to wait later.
  struct Conflict {
    Key key;
    std::string call;
  };
  std::optional<Conflict> FindConflict(int process, const Key& key, uint64_t members,
                                       int64_t since_ns, int64_t until_ns, bool waits);
  // A conflict with the collective of a key has become an error here, whoever found it. If this
  // process comes to that collective yet, it is to fail by it too: the others are in it, and have
  // no other way to learn that the ranks differ. `own`: the collective that fails by it here.
  void Tell(const Key& conflict, const Key& own, const std::string& error);
  struct Told {
    Key key;
    int64_t found_ns;
    Key own;
    std::string error;
  };
  // What was told of the collective of a key.
  std::optional<Told> WhatWasTold(const Key& key);
  char* At(int process, int64_t arena_offset) const;

  // Tells processes that there is news.
  void Ring(int process);
  void RingAll();
  // Whether the processes have fewer cores, all together, than they are.
  bool is_crowded() const { return is_crowded_; }
  // For who waits without sleeping.
  void Yield() { core_sharing_->Yield(); }
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

  bool IsDead(int process);
  bool HasLeft(int process) const {
    return header(process)->state.load() == ProcessState::kLeaving;
  }
  // What became of a process that is dead or has left.
  std::string Fate(int process);
  // Looks who is dead, so that nothing is kept for them.
  void LookForDeaths();
  // This process goes: it begins no collective any more, and those of others that wait for it to
  // come fail with the reason.
  void Leave(const std::string& reason);
  // How long no collective has been open here; 0 if some is.
  int64_t QuietNs();
  // Keeps idle_since_ns up to date; called now and then by the progress thread.
  void WatchIdleness(int64_t now_ns);
  // There is nothing that the progress thread waits for: the process computes, for all we know.
  void StopWatchingIdleness();
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
  // Maps another process's segment; in their order.
  std::optional<Failure> Meet(int process);
  Header* header(int process) const;
  int NumCores() const;
  Post* posts(int process) const;
  void WaitForDoorbell(uint32_t seen, int64_t ns);
  int num_words() const { return (num_processes() + Post::kWordBits - 1) / Post::kWordBits; }
  bool IsAwaited(const Post& post) const;
  bool IsHeld(const Post& post) const;
  bool TryToFree(Post* post);
  void SweepLocked();
  void ReleaseLocked(int64_t offset, int64_t nbytes);
  bool WasTold(const Key& key, int64_t since_ns);
  const Told* FindTold(const Key& key) const;

  int self_ = 0;
  std::vector<std::unique_ptr<Segment>> segments_;  // By process.
  std::vector<PeerHeap> heaps_;                     // By process.
  std::vector<ProcessInfo> peers_;
  std::vector<int> pidfds_;
  bool is_crowded_ = false;
  std::unique_ptr<CoreSharing> core_sharing_;
  std::atomic<uint32_t> dead_[Post::kWords] = {};  // Known to be, one bit each.

  std::mutex told_mu_;
  std::deque<Told> told_;  // Oldest first.

  std::mutex mu_;
  int num_open_ = 0;  // Posts that are not retired.
  int64_t last_retired_ns_ = 0;
  std::vector<Retired> retired_;  // Oldest first.
  std::vector<Free> free_;        // By offset; neighbours are joined.
  uint64_t next_ticket_ = 0;
  std::set<uint64_t> waiting_;
  int64_t cpu_ns_ = 0, cpu_checked_ns_ = 0;
};

int64_t MonotonicNs();

}  // namespace jcoll
