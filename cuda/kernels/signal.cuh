// Blocks of different ranks wait for each other, for a bounded time; see SignalPad for the
// counters.
//
//   __global__ void Kernel(const __grid_constant__ Args args) {
//     BlockSync sync(args.peers, args.op_id);
//     if (sync.Barrier(Order::kData)) {
//       ... read or write peers' buffers ...
//       sync.Barrier(Order::kData);
//     }
//     sync.Leave(args.poison);
//   }
//
// Every thread of every block calls all of these, in the same order on all ranks.
#pragma once

#include "cuda/kernels/culprit.cuh"
#include "cuda/kernels/launchers.h"
#include "cuda/kernels/memory_order.cuh"

namespace jcoll::gpu {

// What a barrier orders besides time.
enum class Order {
  kData,   // What any rank has written before it, every rank can read after it.
  kReads,  // What any rank has read before it, every rank may overwrite after it.
};

class BlockSync {
 public:
  __device__ BlockSync(const PeerTable& peers, uint32_t op_id)
      : peers_(peers),
        pad_(peers.pad[peers.rank]),
        op_id_(op_id),
        epoch_(pad_->epoch[blockIdx.x]),
        line_epoch_(pad_->line_epoch[blockIdx.x]) {
    alive_ = !__syncthreads_or(GaveUp() || IsSecond());
  }

  // Whether all ranks' block of this number came here in time; the same for all threads of the
  // block. After a failure it returns at once.
  __device__ bool Barrier(Order order) {
    if (!alive_) return false;
    ++epoch_;
    if (phase_ == Phase::kOutside) phase_ = Phase::kEntering;
    __syncthreads();  // What any thread of the block did before is before the thread that signals.
    Arrive(order);
    const bool failed = !Await(order);
    if (threadIdx.x == 0) pad_->epoch[blockIdx.x] = epoch_;
    if (Agree(!failed)) phase_ = Phase::kInside;
    return alive_;
  }

  // A block that has passed a barrier may count further events, as ticks behind the barrier's
  // epoch: Tick tells one peer of it, for what the block did before the last __syncthreads;
  // AwaitTick waits until a peer has told of so many. Each is for one thread. In the end all
  // threads call Advance, with as many ticks on every rank, which is at least what any has counted.
  __device__ void Tick(int peer, uint32_t ticks, Order order) {
    uint32_t* inbox = &peers_.pad[peer]->inbox[blockIdx.x][peers_.rank];
    if (order == Order::kData) {
      st_release_sys(inbox, epoch_ + ticks);
    } else {
      st_after_loads_sys(inbox, epoch_ + ticks);
    }
  }
  __device__ bool AwaitTick(int peer, uint32_t ticks, Order order) {
    const uint32_t expected = epoch_ + ticks;
    const uint32_t* inbox = &pad_->inbox[blockIdx.x][peer];
    const auto load = [inbox, order] {
      return order == Order::kData ? ld_acquire_sys(inbox) : ld_before_stores_sys(inbox);
    };
    const auto arrived = [expected](uint32_t seen) {
      return static_cast<int32_t>(seen - expected) >= 0;
    };
    return WaitFor(peer, expected, load, arrived, WaitPlace::kInbox);
  }
  __device__ void Advance(uint32_t ticks) {
    epoch_ += ticks;
    if (threadIdx.x == 0) pad_->epoch[blockIdx.x] = epoch_;
  }

  // Whether `ok` is true for all threads of the block. If not, the block passes no barrier any
  // more.
  __device__ bool Agree(bool ok) {
    alive_ = !__syncthreads_or(!ok);
    return alive_;
  }

  // The flag of the exchange by lines that this block begins. Flags of consecutive exchanges are
  // consecutive numbers, odd ones and even ones in turn, and never 0, which is what a line has that
  // was never written. When the counter wraps around, old lines could pass for new ones: then
  // `clean` has to write 0 to all of the block's lines, while no peer writes to them. All threads
  // of the block call it; alive() is false after it if a peer did not come.
  template <typename Clean>
  __device__ uint32_t NextLines(Clean clean) {
    if (++line_epoch_ == 0) {
      if (Barrier(Order::kReads)) clean();
      Barrier(Order::kData);
      line_epoch_ = 2;
    }
    if (threadIdx.x == 0) pad_->line_epoch[blockIdx.x] = line_epoch_;
    return line_epoch_;
  }

  // The last thing that a kernel does. A block that has failed stays until no peer touches its
  // rank's memory any more, which the program may use for something else when the kernel is over.
  // The block that is last poisons the output, if this rank has given up: when all others are
  // through, nothing overwrites that.
  __device__ void Leave(const Poison& poison) {
    __syncthreads();
    if (!alive_) {
      if (threadIdx.x == 0) st_release_sys(&pad_->gone[blockIdx.x], 1);
      AwaitPeersGone();
      __syncthreads();
    }
    bool poisons = false;
    if (threadIdx.x == 0 && add_acq_rel_gpu(&pad_->blocks_done, 1) == gridDim.x - 1) {
      pad_->blocks_done = 0;
      st_relaxed_sys(&pad_->owned, 0);
      st_relaxed_sys(&pad_->calls, pad_->calls + 1);
      poisons = GaveUp();
    }
    if (__syncthreads_or(poisons)) Fill(poison);
  }

  __device__ bool alive() const { return alive_; }

  // Waits until `load()` satisfies `arrived`, for what `peer` sends. False if it took too long. For
  // one thread; the block finds out about it in Leave. `place`: where peers can see it too.
  template <typename Load, typename Arrived>
  __device__ bool WaitFor(int peer, uint32_t expected, Load load, Arrived arrived,
                          WaitPlace place = WaitPlace::kUntold) {
    auto value = load();
    if (arrived(value)) return true;
    const uint64_t start = global_timer_ns();
    for (uint32_t polls = 1; !arrived(value = load()); ++polls) {
      pause();
      if (polls % kPollsPerLook != 0) continue;
      if (polls == kPollsPerLook && place != WaitPlace::kUntold) {
        st_relaxed_sys(&pad_->waiting[blockIdx.x], Waiting{expected, place, peer}.ToWord());
      }
      if (GaveUp()) return false;
      const uint64_t waited = global_timer_ns() - start;
      if (waited < peers_.timeout_ns) continue;
      GiveUp(ErrorKind::kTimeout, FindCulprit(peers_, peer), expected, Seen(value), waited);
      return false;
    }
    return true;
  }

  // Records an error, and ends this launch and all later ones on every rank. For one thread.
  __device__ void GiveUp(ErrorKind kind, int peer, uint32_t expected, uint32_t seen,
                         uint64_t waited_ns) {
    Record(kind, peer, expected, seen, waited_ns);
    const int to_blame = kind == ErrorKind::kTimeout ? peer : peers_.rank;
    for (int p = 0; p < peers_.num_ranks; ++p) {
      st_relaxed_sys(&peers_.pad[p]->dead, static_cast<uint32_t>(1 + to_blame));
    }
  }

 private:
  // Looking at the clock and at `dead` costs about as much as a poll.
  static constexpr uint32_t kPollsPerLook = 8;
  // By then a store to a peer's pad has long been seen there: links take microseconds.
  static constexpr uint64_t kSettledNs = 1'000'000;

  // Where this block is in its launch: before its first barrier, in it, or behind it, where peers
  // read and write its rank's buffers, and it theirs.
  enum class Phase { kOutside, kEntering, kInside };

  __device__ static uint32_t Seen(uint32_t value) { return value; }
  __device__ static uint32_t Seen(const Line& line) { return line.half[1] >> 32; }

  __device__ void Arrive(Order order) {
    for (int p = threadIdx.x; p < peers_.num_ranks; p += blockDim.x) {
      if (p != peers_.rank) Tick(p, 0, order);
    }
  }

  // Peers that have given up may have come here before. So each thread, after its signal to a peer,
  // looks whether any has: either it sees that, or the peer has seen the signal when it leaves, and
  // waits for this block to be gone. The look is under way together with that for the peer.
  __device__ bool Await(Order order) {
    for (int p = threadIdx.x; p < peers_.num_ranks; p += blockDim.x) {
      if (p == peers_.rank) continue;
      const bool is_told = ld_relaxed_sys(&pad_->dead) != 0;
      if (!AwaitTick(p, 0, order) || (is_told && GaveUp())) return false;
    }
    return true;
  }

  // After a failure, when `gone` is set: until all peers' block of this number is gone too, or
  // through with this launch, or did not come to its first barrier in time for it to be passed. A
  // peer that has stopped inside does none of these: then it ends after another timeout.
  __device__ void AwaitPeersGone() {
    if (phase_ == Phase::kOutside) return;  // No peer got in, as it lacks this block's signal.
    const uint64_t start = global_timer_ns();
    for (int p = threadIdx.x; p < peers_.num_ranks; p += blockDim.x) {
      while (p != peers_.rank && !IsGone(p)) {
        const uint64_t waited = global_timer_ns() - start;
        if (waited >= peers_.timeout_ns) return;
        if (waited >= kSettledNs && !MayBeInside(p)) break;
        pause();
      }
    }
  }
  __device__ bool IsGone(int peer) {
    const SignalPad* pad = peers_.pad[peer];
    return ld_acquire_sys(&pad->gone[blockIdx.x]) != 0 ||
           static_cast<int32_t>(ld_relaxed_sys(&pad->calls) - pad_->calls) > 0;
  }
  __device__ bool MayBeInside(int peer) {
    const uint32_t seen = ld_relaxed_sys(&pad_->inbox[blockIdx.x][peer]);
    return phase_ == Phase::kInside || static_cast<int32_t>(seen - epoch_) >= 0;
  }

  // Whether this rank has given up, or has been told to. One that was told has its own record.
  __device__ bool GaveUp() {
    const uint32_t dead = ld_relaxed_sys(&pad_->dead);
    if (dead == 0) return false;
    Record(ErrorKind::kPeerGaveUp, static_cast<int32_t>(dead) - 1, epoch_, epoch_, 0);
    return true;
  }

  // Whether another launch on this pad has not ended yet, which would use the same counters.
  __device__ bool IsSecond() {
    const bool looks = blockIdx.x == 0 && threadIdx.x == blockDim.x - 1;
    if (!looks || exchange_relaxed_sys(&pad_->owned, 1) == 0) return false;
    GiveUp(ErrorKind::kLaunchesOverlap, peers_.rank, 0, 1, 0);
    return true;
  }

  __device__ void Record(ErrorKind kind, int peer, uint32_t expected, uint32_t seen,
                         uint64_t waited_ns) {
    ErrorRecord* error = peers_.error;
    if (ld_relaxed_sys(&error->state) != 0 || cas_relaxed_sys(&error->state, 0, 1) != 0) return;
    error->op_id = op_id_;
    error->call = pad_->calls;
    error->rank = peers_.rank;
    error->peer = peer;
    error->block = blockIdx.x;
    error->expected = expected;
    error->seen = seen;
    error->waited_ns = waited_ns;
    error->kind = kind;
    st_release_sys(&error->state, 2);
  }

  // A peer that has stopped inside, and goes on after another timeout, may still store its part.
  JCOLL_RACY __device__ static void Fill(const Poison& poison) {
    char* output = static_cast<char*>(poison.output);
    for (int64_t i = threadIdx.x; i < poison.nbytes; i += blockDim.x) {
      output[i] = static_cast<char>(poison.pattern >> (i % 8 * 8));
    }
  }

  const PeerTable& peers_;
  SignalPad* const pad_;
  const uint32_t op_id_;
  uint32_t epoch_;       // Barriers that this block has passed, or waits in.
  uint32_t line_epoch_;  // The flag of the last exchange by lines.
  bool alive_;
  Phase phase_ = Phase::kOutside;
};

}  // namespace jcoll::gpu
