#include "world.h"

#include <linux/futex.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <new>

#include "../align.h"
#include "peer_reads.h"

namespace jcoll {
namespace {

// A process with another library than ours may have other segments. Whoever changes their layout
// changes this, too.
constexpr uint64_t kMagic = 0x364d48534c4c4f43;  // "COLLSHM6"
static_assert(sizeof(Post) == 3072, "another layout: another kMagic");
// Failed posts are kept for the late arrival of those that have not seen them.
constexpr size_t kMaxRetired = 256;
constexpr size_t kMaxTold = 64;
constexpr int64_t kSecond = 1000000000;

World* g_world = nullptr;
std::unique_ptr<Segment> g_own;  // Between Prepare and Join.
int64_t g_peer_reads = 1 << 20;
const HeapRange* g_heap = nullptr;

int64_t InLines(int64_t nbytes) { return RoundUp(nbytes, kLineNbytes); }
int64_t PostsOffset() { return InLines(sizeof(Header)); }
int64_t ArenaOffset() { return InLines(PostsOffset() + World::kMaxPosts * int64_t{sizeof(Post)}); }

int64_t ClockNs(clockid_t clock) {
  timespec t;
  clock_gettime(clock, &t);
  return t.tv_sec * kSecond + t.tv_nsec;
}

long Futex(std::atomic<uint32_t>* word, int op, uint32_t value, const timespec* timeout) {
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), op, value, timeout, nullptr, 0);
}

}  // namespace

Key MakeKey(std::initializer_list<uint64_t> parts) {
  Key key{0x9e3779b97f4a7c15ull, 0xc2b2ae3d27d4eb4full};
  for (uint64_t part : parts) {
    key.hi = (key.hi ^ part) * 0xff51afd7ed558ccdull;
    key.hi ^= key.hi >> 32;
    key.lo = (key.lo + key.hi) * 0xc4ceb9fe1a85ec53ull;
    key.lo ^= key.lo >> 29;
  }
  return key;
}

uint64_t Mix(uint64_t hash, uint64_t value) {
  hash ^= value + 0x9e3779b97f4a7c15ull + (hash << 6) + (hash >> 2);
  hash *= 0xff51afd7ed558ccdull;
  return hash ^ (hash >> 33);
}

int64_t MonotonicNs() { return ClockNs(CLOCK_MONOTONIC); }

std::optional<Failure> World::Prepare(int64_t arena_nbytes, ProcessInfo* info) {
  auto segment = std::make_unique<Segment>();
  if (auto failure = segment->Create(ArenaOffset() + InLines(arena_nbytes))) return failure;
  Header* h = new (segment->data()) Header();
  h->magic = kMagic;
  if (getrandom(h->nonce.data(), sizeof(h->nonce), 0) != sizeof(h->nonce)) {
    return Failure{FailureCode::kInternal,
                   std::string("jcoll: the system gives no random number: ") +
                       std::strerror(errno) + ".\n  Allow the process getrandom(2)."};
  }
  h->probe = ReadProbe::address();
  h->heap = HeapPlace::Of(g_heap);
  if (sched_getaffinity(0, sizeof(cpu_set_t), &h->allowed_cores) != 0) CPU_ZERO(&h->allowed_cores);
  h->state.store(ProcessState::kAlive);
  for (int i = 0; i < kMaxPosts; ++i) {
    new (segment->data() + PostsOffset() + i * int64_t{sizeof(Post)}) Post();
  }
  *info = {static_cast<int>(getpid()), segment->fd(), segment->nbytes(), h->nonce, 0};
  g_own = std::move(segment);
  return std::nullopt;
}

void World::SetPeerReads(int64_t min_nbytes) { g_peer_reads = min_nbytes; }

int64_t World::PeerReads() { return g_peer_reads; }

void World::SetHeap(const HeapRange* heap) { g_heap = heap; }

std::optional<Failure> World::Join(int self, const std::vector<ProcessInfo>& infos) {
  if (infos.size() > Post::kMaxProcesses) {
    return Failure{
        FailureCode::kInvalidArgument,
        "jcoll: " + std::to_string(infos.size()) + " processes of this host; at most " +
            std::to_string(Post::kMaxProcesses) +
            " can share memory.\n  Give them several JCOLL_HOST_ID, or each process more "
            "devices."};
  }
  std::unique_ptr<World> world(new World());
  world->self_ = self;
  world->peers_ = infos;
  for (int p = 0; p < static_cast<int>(infos.size()); ++p) {
    if (p == self) {
      world->segments_.push_back(std::move(g_own));
      world->pidfds_.push_back(-1);
    } else if (auto failure = world->Meet(p)) {
      return failure;
    }
  }
  bool reads_peers = g_peer_reads > 0;
  for (int p = 0; p < world->num_processes() && reads_peers; ++p) {
    reads_peers = p == self || ReadProbe::Try(infos[p].pid, world->header(p)->probe);
  }
  world->header(self)->reads_peers.store(reads_peers);
  bool maps_heaps = true;
  world->heaps_.resize(infos.size());
  for (int p = 0; p < world->num_processes(); ++p) {
    if (p != self) maps_heaps &= world->heaps_[p].Map(infos[p].pid, world->header(p)->heap);
  }
  if (!maps_heaps) world->heaps_.clear();  // Not all: none is used.
  world->header(self)->maps_heaps.store(maps_heaps);
  const int num_cores = world->NumCores();
  world->is_crowded_ = num_cores > 0 && world->num_processes() > num_cores;
  world->core_sharing_ =
      std::make_unique<CoreSharing>(world->header(0)->cores, self, !world->is_crowded_);
  world->free_.push_back({ArenaOffset(), world->segments_[self]->nbytes() - ArenaOffset()});
  g_world = world.release();  // Lives as long as the process: peers may look at any time.
  return std::nullopt;
}

std::optional<Failure> World::Meet(int process) {
  const ProcessInfo& info = peers_[process];
  // First of all: what is found in /proc afterwards is of the process that this stands for, or of
  // none that has the nonce. Fails on kernels before 5.3; IsDead then asks by number.
  pidfds_.push_back(static_cast<int>(syscall(SYS_pidfd_open, info.pid, 0)));
  auto segment = std::make_unique<Segment>();
  if (auto failure = segment->Open(info.pid, info.fd, info.nbytes)) return failure;
  const Header* h = reinterpret_cast<const Header*>(segment->data());
  const std::string name = NameOf(process);
  if (h->magic != kMagic) {
    return Failure{FailureCode::kInternal, "jcoll: " + name +
                                               " shares memory of another version of jcoll.\n"
                                               "  Run the same version in all processes."};
  }
  if (h->nonce != info.nonce) {
    const std::string pid = std::to_string(info.pid);
    return Failure{FailureCode::kInternal,
                   "jcoll: what " + name +
                       " shares is not the memory of the process that has pid " + pid +
                       " here: it has ended, or numbers its processes apart.\n  Processes of "
                       "one host must see each other in one /proc; give those of different "
                       "containers different JCOLL_HOST_ID."};
  }
  segments_.push_back(std::move(segment));
  return std::nullopt;
}

// Of all processes together; 0: the system does not say (more cores than a cpu_set_t has).
int World::NumCores() const {
  cpu_set_t all;
  CPU_ZERO(&all);
  for (int p = 0; p < num_processes(); ++p) CPU_OR(&all, &all, &header(p)->allowed_cores);
  return CPU_COUNT(&all);
}

World* World::Get() { return g_world; }

int World::ProcessOf(int64_t id) const {
  for (int p = 0; p < num_processes(); ++p) {
    if (peers_[p].id == id) return p;
  }
  return -1;
}

Header* World::header(int process) const {
  return reinterpret_cast<Header*>(segments_[process]->data());
}
Post* World::posts(int process) const {
  return reinterpret_cast<Post*>(segments_[process]->data() + PostsOffset());
}
char* World::At(int process, int64_t arena_offset) const {
  return segments_[process]->data() + arena_offset;
}

Post* World::OpenPost(const Key& key, uint64_t members, uint64_t signature,
                      const std::vector<int>& num_ranks, const std::string& call,
                      const std::string& site, bool as_failed) {
  std::lock_guard<std::mutex> lock(mu_);
  SweepLocked();
  for (int i = 0; i < (as_failed ? kWindow : kWindow - kReserve); ++i) {
    Post& post = posts(self_)[(key.lo + i) % kMaxPosts];
    if (post.state() != PostState::kFree) continue;
    // Who reads on from an earlier use sees that the tag has changed if it sees any of this.
    std::atomic_thread_fence(std::memory_order_release);
    post.key_hi.store(key.hi, std::memory_order_relaxed);
    post.key_lo.store(key.lo, std::memory_order_relaxed);
    post.opened_ns.store(MonotonicNs(), std::memory_order_relaxed);
    post.members.store(members, std::memory_order_relaxed);
    post.signature.store(signature, std::memory_order_relaxed);
    post.arena_offset.store(0, std::memory_order_relaxed);
    for (int w = 0; w < num_words(); ++w) {
      uint32_t awaited = 0;
      const int end = std::min(num_processes(), (w + 1) * Post::kWordBits);
      for (int p = w * Post::kWordBits; p < end; ++p) {
        if (p != self_ && num_ranks[p] > 0) awaited |= Post::Bit(p);
      }
      post.users[w].awaited.store(awaited, std::memory_order_relaxed);
    }
    post.call.Set(call);
    post.site.Set(site);
    post.SetState(PostState::kOpen);
    ++num_open_;
    return &post;
  }
  return nullptr;
}

void World::Fail(Post* post, const std::string& why, const Key& conflict) {
  post->error.Set(why);
  post->conflict_hi.store(conflict.hi);
  post->conflict_lo.store(conflict.lo);
  post->failed_ns.store(MonotonicNs());
  post->SetState(PostState::kFailed);
  RingAll();
}

void World::Retire(Post* post, int64_t arena_offset, int64_t arena_nbytes) {
  std::lock_guard<std::mutex> lock(mu_);
  if (post->state() != PostState::kFailed) post->SetState(PostState::kDone);
  retired_.push_back({post, arena_offset, arena_nbytes});
  --num_open_;
  last_retired_ns_ = MonotonicNs();
  SweepLocked();
}

bool World::IsAwaited(const Post& post) const {
  for (int w = 0; w < num_words(); ++w) {
    if (post.users[w].awaited.load() & ~dead_[w].load()) return true;
  }
  return false;
}

bool World::IsHeld(const Post& post) const {
  for (int w = 0; w < num_words(); ++w) {
    if (static_cast<uint32_t>(post.users[w].holders.load()) & ~dead_[w].load()) return true;
  }
  return false;
}

// Ends the use of a post, unless a living process holds it; nobody can take hold of it then.
bool World::TryToFree(Post* post) {
  const uint64_t next = (uint64_t{Post::UseOf(post->tag.load())} + 1) << 32;
  for (int w = 0; w < num_words(); ++w) {
    uint64_t now = post->users[w].holders.load();
    do {
      if (static_cast<uint32_t>(now) & ~dead_[w].load()) return false;
    } while (!post->users[w].holders.compare_exchange_weak(now, next));
  }
  post->tag.store(next | static_cast<uint32_t>(PostState::kFree));
  return true;
}

// Frees what nobody comes for any more, and the oldest of those that somebody may yet come for. The
// memory of failed ones is given back as soon as nobody reads it: only their text is waited for.
void World::SweepLocked() {
  size_t kept = 0;
  const size_t excess = retired_.size() > kMaxRetired ? retired_.size() - kMaxRetired : 0;
  for (size_t i = 0; i < retired_.size(); ++i) {
    Retired r = retired_[i];
    const bool is_failed = r.post->state() == PostState::kFailed;
    const bool is_free = (!IsAwaited(*r.post) || (is_failed && i < excess)) && TryToFree(r.post);
    if (r.nbytes > 0 && (is_free || (is_failed && !IsHeld(*r.post)))) {
      ReleaseLocked(r.offset, r.nbytes);
      r.nbytes = 0;
    }
    if (!is_free) retired_[kept++] = r;
  }
  retired_.resize(kept);
}

uint64_t World::TakeTicket() {
  std::lock_guard<std::mutex> lock(mu_);
  waiting_.insert(next_ticket_);
  return next_ticket_++;
}

void World::ForgetTicket(uint64_t ticket) {
  std::lock_guard<std::mutex> lock(mu_);
  waiting_.erase(ticket);
}

int64_t World::Allocate(int64_t nbytes, uint64_t ticket) {
  nbytes = InLines(nbytes);
  std::lock_guard<std::mutex> lock(mu_);
  if (*waiting_.begin() != ticket) return -1;
  SweepLocked();
  for (auto f = free_.begin(); f != free_.end(); ++f) {
    if (f->nbytes < nbytes) continue;
    const int64_t offset = f->offset;
    f->offset += nbytes;
    f->nbytes -= nbytes;
    if (f->nbytes == 0) free_.erase(f);
    waiting_.erase(ticket);
    return offset;
  }
  return -1;
}

void World::ReleaseLocked(int64_t offset, int64_t nbytes) {
  nbytes = InLines(nbytes);
  auto next = std::find_if(free_.begin(), free_.end(),
                           [offset](const Free& f) { return f.offset > offset; });
  next = free_.insert(next, {offset, nbytes});
  if (next + 1 != free_.end() && next->offset + next->nbytes == (next + 1)->offset) {
    next->nbytes += (next + 1)->nbytes;
    free_.erase(next + 1);
  }
  if (next != free_.begin() && (next - 1)->offset + (next - 1)->nbytes == next->offset) {
    (next - 1)->nbytes += next->nbytes;
    free_.erase(next);
  }
}

int64_t World::arena_nbytes() const { return segments_[self_]->nbytes() - ArenaOffset(); }

Post* World::Find(int process, const Key& key) const {
  for (int i = 0; i < kWindow; ++i) {
    Post& post = posts(process)[(key.lo + i) % kMaxPosts];
    if (post.state() != PostState::kFree && post.HasKey(key)) return &post;
  }
  return nullptr;
}

Post* World::FindAndHold(int process, const Key& key) const {
  for (int i = 0; i < kWindow; ++i) {
    Post& post = posts(process)[(key.lo + i) % kMaxPosts];
    const uint64_t tag = post.tag.load();
    if (Post::StateOf(tag) < PostState::kReady || !post.HasKey(key)) continue;
    if (post.Hold(Post::UseOf(tag), self_)) return &post;
  }
  return nullptr;
}

std::optional<World::Conflict> World::FindConflict(int process, const Key& key, uint64_t members,
                                                   int64_t since_ns, int64_t until_ns, bool waits) {
  for (int i = 0; i < kMaxPosts; ++i) {
    const Post& post = posts(process)[i];
    const uint64_t tag = post.tag.load();
    const PostState state = Post::StateOf(tag);
    const bool has_failed = state == PostState::kFailed && post.failed_ns.load() > since_ns;
    const bool has_waited = waits && state == PostState::kReady && post.opened_ns.load() < until_ns;
    if (!has_failed && !has_waited) continue;
    if (post.HasKey(key) || post.members.load() != members) continue;
    const Key other{post.key_hi.load(), post.key_lo.load()};
    if (Find(self_, other) != nullptr || WasTold(other, since_ns)) continue;
    // Afterwards: our post is gone only when its owner has seen that we have done our part.
    if (!post.Awaits(self_)) continue;
    const std::string call = post.call.Get() + post.site.Get();
    std::atomic_thread_fence(std::memory_order_acquire);
    if (post.tag.load(std::memory_order_relaxed) != tag) continue;  // Next time.
    return Conflict{other, call};
  }
  return std::nullopt;
}

bool World::WasTold(const Key& key, int64_t since_ns) {
  std::lock_guard<std::mutex> lock(told_mu_);
  const Told* told = FindTold(key);
  return told != nullptr && told->found_ns <= since_ns;
}

void World::Tell(const Key& conflict, const Key& own, const std::string& error) {
  std::lock_guard<std::mutex> lock(told_mu_);
  if (FindTold(conflict) != nullptr) return;  // Many may fail by it: the first time counts.
  told_.push_back({conflict, MonotonicNs(), own, error});
  if (told_.size() > kMaxTold) told_.pop_front();
}

std::optional<World::Told> World::WhatWasTold(const Key& key) {
  std::lock_guard<std::mutex> lock(told_mu_);
  const Told* told = FindTold(key);
  return told == nullptr ? std::nullopt : std::optional<Told>(*told);
}

const World::Told* World::FindTold(const Key& key) const {
  for (const Told& t : told_) {
    if (t.key == key) return &t;
  }
  return nullptr;
}

void World::Ring(int process) {
  Header* h = header(process);
  if (h->sleeping.load() == 0) return;
  h->doorbell.fetch_add(1);
  Futex(&h->doorbell, FUTEX_WAKE, INT_MAX, nullptr);
}

void World::RingAll() {
  for (int p = 0; p < num_processes(); ++p) {
    if (p != self_) Ring(p);
  }
}

void World::WaitForDoorbell(uint32_t seen, int64_t ns) {
  const timespec timeout{ns / kSecond, ns % kSecond};
  Futex(&header(self_)->doorbell, FUTEX_WAIT, seen, &timeout);
}

bool World::IsDead(int process) {
  std::atomic<uint32_t>& word = dead_[process / Post::kWordBits];
  if (process == self_) return false;
  if (word.load() & Post::Bit(process)) return true;
  pollfd p{pidfds_[process], POLLIN, 0};
  const bool is_dead =
      p.fd >= 0 ? poll(&p, 1, 0) > 0 : kill(peers_[process].pid, 0) != 0 && errno == ESRCH;
  if (is_dead) word.fetch_or(Post::Bit(process));
  return is_dead;
}

void World::LookForDeaths() {
  for (int p = 0; p < num_processes(); ++p) IsDead(p);
}

std::string World::Fate(int process) {
  if (HasLeft(process)) {
    return NameOf(process) + " has left (" + header(process)->reason.Get() + ")";
  }
  return NameOf(process) + " (pid " + std::to_string(peers_[process].pid) + ") has died";
}

void World::Leave(const std::string& reason) {
  Header* h = header(self_);
  h->reason.Set(reason);
  h->state.store(ProcessState::kLeaving);
  RingAll();
}

int64_t World::QuietNs() {
  std::lock_guard<std::mutex> lock(mu_);
  return num_open_ > 0 ? 0 : MonotonicNs() - last_retired_ns_;
}

void World::WatchIdleness(int64_t now_ns) {
  constexpr int64_t kInterval = kSecond / 10;
  const int64_t elapsed = now_ns - cpu_checked_ns_;
  if (elapsed < kInterval) return;
  const int64_t cpu = ClockNs(CLOCK_PROCESS_CPUTIME_ID);
  // A tenth of one core: more than what our own waiting takes. Nothing was watched before a pause.
  const bool is_idle = elapsed < 10 * kInterval && (cpu - cpu_ns_) * 10 < elapsed;
  Header* h = header(self_);
  if (!is_idle) {
    h->idle_since_ns.store(0);
  } else if (h->idle_since_ns.load() == 0) {
    h->idle_since_ns.store(now_ns);
  }
  cpu_ns_ = cpu;
  cpu_checked_ns_ = now_ns;
}

void World::StopWatchingIdleness() {
  header(self_)->idle_since_ns.store(0);
  cpu_checked_ns_ = 0;
}

}  // namespace jcoll
