/* The barrier, over and over: each rank writes the next version of its data, meets its peers, looks
 * at their data.
 *
 * A rank is one block. The first THREADED ranks are modelled thread by thread: thread t signals
 * peer t and waits for it, thread `me` has no peer and does the work. The other ranks are one
 * process each, which does the same in sequence.
 *
 * Proved: nobody leaves barrier k before all have entered it; the data that a peer wrote before
 * barrier k is there after it; nobody is more than one barrier ahead; no deadlock, so no lost
 * wake-up; all of it for counters that wrap around, as the ranks never stop. */

#include "memory.pml"
#include "signal.pml"

#ifndef THREADED
#define THREADED 0
#endif

byte arrived[N];
bool phase[N];
byte entered[N];  /* The number of the barrier that a rank is in, or was in last. */

#ifdef BUG_NO_SYNC_BEFORE
#define SYNC_BEFORE skip
#else
#define SYNC_BEFORE sync(arrived[me], phase[me], my_phase, N)
#endif
#ifdef BUG_NO_SYNC_AFTER
#define SYNC_AFTER skip
#else
#define SYNC_AFTER sync(arrived[me], phase[me], my_phase, N)
#endif

#define NEXT_RANK(me) (((me) + 1) % N)

#ifdef BUG_SIGNALS_TOO_FEW
#define SIGNALS(me, peer) ((peer) != NEXT_RANK(me))
#else
#define SIGNALS(me, peer) true
#endif
#ifdef BUG_WAITS_FOR_TOO_FEW
#define WAITS(me, peer) ((peer) != NEXT_RANK(me))
#else
#define WAITS(me, peer) true
#endif

inline enter(me, k) {
  d_step { k = ADD(k, 1); entered[me] = k; written[BLOCK(me, 0)] = k }
}

inline signal_peer(me, peer) {
  if
  :: SIGNALS(me, peer) -> arrive(me, peer, 0, target, ORDERED)
  :: else
  fi
}

inline wait_for_peer(me, peer) {
  if
  :: WAITS(me, peer) -> wait_at_least(me, peer, 0, target, ORDERED)
  :: else
  fi
}

inline pass_epoch(me) {
#ifndef BUG_EPOCH_NOT_KEPT
  epoch[me] = ADD(epoch[me], 1)
#else
  skip
#endif
}

/* At one moment: as the moment may come late, that is as good as one peer after the other. */
inline check_peers(me, k) {
  d_step {
    for (peer : 0 .. N - 1) {
      if
      :: peer != me ->
        assert(SUB(entered[peer], k) <= 1);
        assert(LOADS_ONLY(k, view[PAIR(me, peer, 0)], written[BLOCK(peer, 0)]))
      :: else
      fi
    };
    peer = 0
  }
}

/* A launch has one barrier here. Threads read the pad's epoch when it starts. */
proctype Signaller(byte me, peer) {
  byte target = 1;
  bool my_phase;
  do
  :: SYNC_BEFORE;
    signal_peer(me, peer);
    wait_for_peer(me, peer);
#ifdef BUG_LAUNCHES_OVERLAP
    target = ADD(epoch[me], 1);
    SYNC_AFTER
#else
    SYNC_AFTER;
    target = ADD(epoch[me], 1)
#endif
  od
}

proctype Worker(byte me) {
  byte k, peer;
  bool my_phase;
  do
  :: enter(me, k);
    SYNC_BEFORE;
    pass_epoch(me);
    SYNC_AFTER;
progress:
    check_peers(me, k)
  od
}

/* Stores to all peers in one step: each is seen when its peer looks. */
proctype Rank(byte me) {
  byte k, peer, target;
  do
  :: enter(me, k);
    target = ADD(epoch[me], 1);
    atomic {
      for (peer : 0 .. N - 1) {
        if
        :: peer != me -> signal_peer(me, peer)
        :: else
        fi
      };
      peer = 0
    };
    do
    :: peer == N -> break
    :: peer == me -> peer++
    :: else -> wait_for_peer(me, peer); peer++
    od;
    pass_epoch(me);
progress:
    check_peers(me, k)
  od
}

init {
  byte me, peer;
  atomic {
    for (me : 0 .. N - 1) {
      if
      :: me < THREADED ->
        run Worker(me);
        for (peer : 0 .. N - 1) {
          if
          :: peer != me -> run Signaller(me, peer)
          :: else
          fi
        }
      :: else -> run Rank(me)
      fi
    }
  }
}
