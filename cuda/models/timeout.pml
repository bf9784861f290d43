/* The barrier with deadlines, when a rank stops: LAUNCHES launches of one barrier each, by ranks of
 * which the first THREADED are modelled thread by thread (see barrier.pml). At most one rank stops:
 * it does not launch, or some of its threads hang before they signal. A deadline may fire at any
 * time: that a rank is only slow must do no harm.
 *
 * Who gives up tells all ranks by a store to `dead` in their pads, which they see late. Behind a
 * barrier, a rank reads and writes its peers' buffers. A rank whose launch is over uses its own for
 * something else; so one that has failed first waits until no peer is inside.
 *
 *
 * Proved: a barrier returns success only if all ranks have entered it, so that with a rank that
 * stopped before it nobody succeeds; a launch with a barrier that failed is poisoned, and so are
 * all later ones; nobody touches the buffers of a rank whose launch is over; all threads of the
 * other ranks come to an end. */

#include "memory.pml"
#include "signal.pml"

#ifndef LAUNCHES
#define LAUNCHES 2
#endif
#ifndef THREADED
#define THREADED 0
#endif

byte arrived[N];
bool phase[N];
byte entered[N];      /* The launch that a rank is in, or was in last. */
bool told[N];         /* SignalPad::dead is set, by a peer; perhaps not seen yet. */
bool dead[N];         /* It is set, and this rank is sure to see it. */
bool failed[N];       /* __syncthreads_or of the block's threads in this launch. */
byte who_stopped = N; /* N: nobody. */
bool is_gone[N];        /* SignalPad::gone. */
byte calls[N];        /* Launches that are through; SignalPad::calls. */
byte over[N];         /* The first launch that the rank left as failed: it uses its buffers for
                         something else. 0: none. */

#ifdef BUG_NO_DEADLINE
#define DEADLINE false
#else
#define DEADLINE true
#endif

/* Threads of a rank that stopped do not come back from it. */
inline sync_unless_stopped(me) {
  atomic {
    my_phase = phase[me];
    arrived[me]++;
    if
    :: arrived[me] == N -> arrived[me] = 0; phase[me] = !phase[me]
    :: else
    fi
  };
  if
  :: phase[me] != my_phase
  :: who_stopped == me -> goto gone
  fi
}

inline may_stop(me) {
  if
  :: atomic { who_stopped == N || who_stopped == me -> who_stopped = me }; goto gone
  :: skip
  fi
}

/* Of a launch, for the block: by __syncthreads_or. */
inline fail(me) {
#ifndef BUG_FAILURE_NOT_SHARED
  failed[me] = true
#else
  skip
#endif
}

inline tell_all(me) {
  d_step {
    for (i : 0 .. N - 1) {
      told[i] = true
    };
    i = 0;
#ifndef BUG_GIVES_UP_SILENTLY
    dead[me] = true;
#endif
    fail(me)
  }
}

/* GaveUp(): what one load of `dead` may find. */
#define MAY_SEE_DEAD(me) (told[me] || dead[me])

inline wait_or_give_up(me, peer, target) {
  do
  :: see(me, peer, 0)
  :: atomic { REACHED(inbox[PAIR(me, peer, 0)], target) -> acquire(me, peer, 0, ORDERED) }; break
  :: d_step { MAY_SEE_DEAD(me) -> dead[me] = true; fail(me) }; break
#ifdef BUG_RETRIES
  :: DEADLINE -> skip
#else
  :: DEADLINE ->
    tell_all(me);
#ifdef BUG_THREAD_LEAVES_ALONE
    goto gone;
#endif
    break
#endif
  od
}

inline begin_launch(me) {
  may_stop(me);
  d_step { launch++; entered[me] = launch; failed[me] = false };
#ifndef BUG_DEAD_FORGOTTEN
  if
  :: MAY_SEE_DEAD(me) -> d_step { dead[me] = true; fail(me) }
  :: !dead[me]
  fi;
#endif
  entered_barrier = !failed[me]
}

/* After a signal to a peer: either this sees that the peer gave up, or the peer sees the signal. */
inline look_again(me) {
#ifndef BUG_NO_SECOND_LOOK
  if
  :: MAY_SEE_DEAD(me) -> d_step { dead[me] = true; fail(me) }
  :: !dead[me]
  fi
#else
  skip
#endif
}

#ifdef BUG_LOOKS_BEFORE_SIGNAL
#define BEFORE_SIGNAL(me) look_again(me)
#define AFTER_SIGNAL(me) skip
#else
#define BEFORE_SIGNAL(me) skip
#define AFTER_SIGNAL(me) look_again(me)
#endif

/* All that was stored by now is seen: a while after it gave up, a rank may count on that. */
inline settle(me) {
#ifndef BUG_NOT_SETTLED
  d_step {
    for (i : 0 .. N - 1) {
      dead[i] = true;
      if
      :: i != me ->
        do
        :: nempty(on_the_way[PAIR(me, i, 0)]) -> see(me, i, 0)
        :: empty(on_the_way[PAIR(me, i, 0)]) -> break
        od
      :: else
      fi
    };
    i = 0
  }
#else
  skip
#endif
}

/* BlockSync::AwaitPeersGone. Another deadline ends it if a peer has stopped inside; not if it is
 * only slow: that it takes longer than a deadline to get out is excluded. */
#define MAY_BE_INSIDE(me, peer, number) \
  (!is_gone[peer] && calls[peer] < (number) && who_stopped != (peer) && \
   REACHED(inbox[PAIR(me, peer, 0)], ADD(epoch[me], 1)))

inline await_peers_gone(me, number) {
#ifndef BUG_LEAVES_AT_ONCE
  is_gone[me] = true;
  if
  :: entered_barrier ->
    settle(me);
    do
    :: i == N -> break
    :: i < N && (i == me || !MAY_BE_INSIDE(me, i, number)) -> i++
    od;
    i = 0
  :: else
  fi
#else
  skip
#endif
}

/* Behind the barrier, on peers' buffers; a rank may stop there too. */
inline touch_peers(me) {
  d_step {
    assert(!has_failed);
    for (i : 0 .. N - 1) {
      assert(entered[i] >= launch);
      assert(over[i] == 0 || over[i] > launch)
    };
    i = 0
  }
}

inline end_launch(me) {
  if
  :: failed[me] ->
    assert(dead[me]);
    has_failed = true;
    await_peers_gone(me, launch);
    if
    :: over[me] == 0 -> over[me] = launch
    :: else
    fi
  :: else ->
    may_stop(me);
    touch_peers(me)
  fi;
  d_step { calls[me] = launch; epoch[me] = ADD(epoch[me], 1) }
}

proctype Signaller(byte me, peer) {
  byte launch, target, i;
  bool my_phase;
  do
  :: launch == LAUNCHES -> break
  :: else ->
    launch++;
    sync_unless_stopped(me);
    if
    :: failed[me]
    :: else ->
      target = ADD(epoch[me], 1);
      may_stop(me);
      BEFORE_SIGNAL(me);
      arrive(me, peer, 0, target, ORDERED);
      AFTER_SIGNAL(me);
      wait_or_give_up(me, peer, target)
    fi;
    sync_unless_stopped(me)
  od;
gone:
  skip
}

proctype Worker(byte me) {
  byte launch, i;
  bool my_phase, has_failed, entered_barrier;
  do
  :: launch == LAUNCHES -> break
  :: else ->
    begin_launch(me);
    sync_unless_stopped(me);
    sync_unless_stopped(me);
    end_launch(me)
  od;
gone:
  skip
}

proctype Rank(byte me) {
  byte launch, peer, target, i;
  bool has_failed, entered_barrier;
  do
  :: launch == LAUNCHES -> break
  :: else ->
    begin_launch(me);
    target = ADD(epoch[me], 1);
    do
    :: peer == N || failed[me] -> break
    :: peer == me && !failed[me] -> peer++
    :: peer < N && peer != me && !failed[me] ->
      may_stop(me);
      BEFORE_SIGNAL(me);
      arrive(me, peer, 0, target, ORDERED);
      peer++
    od;
    peer = 0;
    do
    :: peer == N || failed[me] -> break
    :: peer == me && !failed[me] -> peer++
    :: peer < N && peer != me && !failed[me] ->
      AFTER_SIGNAL(me);
      wait_or_give_up(me, peer, target);
      peer++
    od;
    peer = 0;
    end_launch(me)
  od;
gone:
  skip
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
