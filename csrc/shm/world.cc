#include "world.h"

#include <linux/futex.h>
#include <poll.h>
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

constexpr uint64_t kMagic = 0x324d48534c4c4f43;  // "COLLSHM2"
// Failed posts are kept for the late arrival of those that have not seen them.
constexpr size_t kMaxRetired = 256;
constexpr int64_t kSecond = 1000000000;

World* g_world = nullptr;
std::unique_ptr<Segment> g_own;  // Between Prepare and Join.
int64_t g_peer_reads = 32 << 10;

int64_t InLines(int64_t nbytes) { return RoundUp(nbytes, kLineNbytes); }
int64_t PostsOffset() { return InLines(sizeof(Header)); }
int64_t ArenaOffset() { return InLines(PostsOffset() + World::kMaxPosts * int64_t{sizeof(Post)}); }

int64_t ClockNs(clockid_t clock) {
  timespec t;
  clock_gettime(clock, &t);
  return t.tv_sec * kSecond + t.tv_nsec;
}

void CopyText(const std::string& text, char* out, size_t size) {
  std::snprintf(out, size, "%s", text.c_str());
}

long Futex(std::atomic<uint32_t>* word, int op, uint32_t value, const timespec* timeout) {
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), op, value, timeout, nullptr, 0);
}

bool IsKey(const Post& post, const Key& key) {
  return post.key_hi.load(std::memory_order_relaxed) == key.hi &&
         post.key_lo.load(std::memory_order_relaxed) == key.lo;
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

int64_t MonotonicNs() { return ClockNs(CLOCK_MONOTONIC); }

std::optional<Failure> World::Prepare(int64_t arena_nbytes, ProcessInfo* info) {
  auto segment = std::make_unique<Segment>();
  if (auto failure = segment->Create(ArenaOffset() + InLines(arena_nbytes))) return failure;
  Header* h = new (segment->data()) Header();
  h->magic = kMagic;
  h->probe = ReadProbe::address();
  h->state.store(ProcessState::kAlive);
  for (int i = 0; i < kMaxPosts; ++i) {
    new (segment->data() + PostsOffset() + i * int64_t{sizeof(Post)}) Post();
  }
  *info = {static_cast<int>(getpid()), segment->fd(), segment->nbytes(), 0};
  g_own = std::move(segment);
  return std::nullopt;
}

void World::SetPeerReads(int64_t min_nbytes) { g_peer_reads = min_nbytes; }

int64_t World::PeerReads() { return g_peer_reads; }

std::optional<Failure> World::Join(int self, const std::vector<ProcessInfo>& infos) {
  std::unique_ptr<World> world(new World());
  world->self_ = self;
  world->peers_ = infos;
  for (int p = 0; p < static_cast<int>(infos.size()); ++p) {
    const bool is_self = p == self;
    auto segment = is_self ? std::move(g_own) : std::make_unique<Segment>();
    if (!is_self) {
      const ProcessInfo& i = infos[p];
      if (auto failure = segment->Open(i.pid, i.fd, i.nbytes)) return failure;
      if (reinterpret_cast<Header*>(segment->data())->magic != kMagic) {
        return Failure{FailureCode::kInternal, "jcoll: " + world->NameOf(p) +
                                                   " shares memory of another version of jcoll.\n"
                                                   "  Run the same version in all processes."};
      }
    }
    world->segments_.push_back(std::move(segment));
    // Fails on kernels before 5.3; IsDead then asks by number.
    world->pidfds_.push_back(is_self ? -1
                                     : static_cast<int>(syscall(SYS_pidfd_open, infos[p].pid, 0)));
  }
  bool reads_peers = g_peer_reads > 0;
  for (int p = 0; p < world->num_processes() && reads_peers; ++p) {
    reads_peers = p == self || ReadProbe::Try(infos[p].pid, world->header(p)->probe);
  }
  world->header(self)->reads_peers.store(reads_peers);
  world->free_.push_back({ArenaOffset(), world->segments_[self]->nbytes() - ArenaOffset()});
  g_world = world.release();  // Lives as long as the process: peers may look at any time.
  return std::nullopt;
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

Post* World::OpenPost(const Key& key, uint64_t members, uint64_t signature, int num_readers,
                      const std::string& call) {
  std::lock_guard<std::mutex> lock(mu_);
  SweepLocked();
  for (int i = 0; i < kWindow; ++i) {
    Post& post = posts(self_)[(key.lo + i) % kMaxPosts];
    if (post.state.load() != PostState::kFree) continue;
    post.key_hi.store(key.hi);
    post.key_lo.store(key.lo);
    post.opened_ns.store(MonotonicNs());
    post.members.store(members);
    post.signature.store(signature);
    post.arena_offset.store(0);
    post.readers_left.store(num_readers);
    CopyText(call, post.call, sizeof(post.call));
    post.state.store(PostState::kOpen);
    return &post;
  }
  return nullptr;
}

void World::Fail(Post* post, const std::string& why) {
  CopyText(why, post->error, sizeof(post->error));
  post->failed_ns.store(MonotonicNs());
  post->state.store(PostState::kFailed);
  RingAll();
}

void World::Retire(Post* post, int64_t arena_offset, int64_t arena_nbytes) {
  std::lock_guard<std::mutex> lock(mu_);
  retired_.push_back({post, arena_offset, arena_nbytes});
  SweepLocked();
}

// Frees what nobody reads any more, and the oldest of those that somebody may yet come for.
void World::SweepLocked() {
  size_t kept = 0;
  const size_t excess = retired_.size() > kMaxRetired ? retired_.size() - kMaxRetired : 0;
  for (size_t i = 0; i < retired_.size(); ++i) {
    const Retired& r = retired_[i];
    const bool is_failed = r.post->state.load() == PostState::kFailed;
    if (r.post->readers_left.load() > 0 && !(is_failed && i < excess)) {
      retired_[kept++] = r;
      continue;
    }
    if (r.nbytes > 0) ReleaseLocked(r.offset, r.nbytes);
    r.post->state.store(PostState::kFree);
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
    if (post.state.load(std::memory_order_acquire) != PostState::kFree && IsKey(post, key)) {
      return &post;
    }
  }
  return nullptr;
}

Post* World::FindConflict(int process, const Key& key, uint64_t members, int64_t since_ns,
                          int64_t now_ns, bool waits) const {
  for (int i = 0; i < kMaxPosts; ++i) {
    Post& post = posts(process)[i];
    const PostState state = post.state.load(std::memory_order_acquire);
    const bool has_failed = state == PostState::kFailed && post.failed_ns.load() > since_ns;
    const bool has_waited =
        waits && state == PostState::kReady && now_ns - post.opened_ns.load() > kSecond;
    if (!has_failed && !has_waited) continue;
    if (IsKey(post, key) || post.members.load() != members) continue;
    if (post.opened_ns.load() < settled_ns_.load()) continue;
    const Key other{post.key_hi.load(), post.key_lo.load()};
    if (Find(self_, other) == nullptr) return &post;
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
  if (pidfds_[process] >= 0) {
    pollfd p{pidfds_[process], POLLIN, 0};
    return poll(&p, 1, 0) > 0;
  }
  return kill(peers_[process].pid, 0) != 0 && errno == ESRCH;
}

std::string World::Fate(int process) {
  Header* h = header(process);
  if (h->state.load() == ProcessState::kLeaving) {
    return NameOf(process) + " has left (" + h->reason + ")";
  }
  if (process != self_ && IsDead(process)) {
    return NameOf(process) + " (pid " + std::to_string(peers_[process].pid) + ") has died";
  }
  return "";
}

void World::Leave(const std::string& reason) {
  Header* h = header(self_);
  CopyText(reason, h->reason, sizeof(h->reason));
  h->state.store(ProcessState::kLeaving);
  RingAll();
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

}  // namespace jcoll
