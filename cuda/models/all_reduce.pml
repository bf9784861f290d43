/* all_reduce launch after launch on the same buffers: one-shot (SHOTS 1, all_reduce_one_shot.cu)
 * and two-shot in one go (SHOTS 2, all_reduce_two_shot.cu).
 *
 * One process is block b of a rank; block b of all ranks work on the same tiles. In each launch:
 *
 *   first barrier (kData)   all inputs are there, nobody needs the last launch's output;
 *   the tiles               read from the inputs of all ranks; two-shot: store the result of one's
 *                           own tiles to all outputs;
 *   last barrier            one-shot (kReads): all have read the inputs; two-shot (kData): all
 *                           results are there as well;
 *   end of the launch       the last block plays what follows in the rank's stream: it uses the
 *                           output, then overwrites the input for the next launch.
 *
 * A block's writes have one version: 2k - 1 with the input of launch k, 2k with its results.
 *
 * Proved: the inputs that are read are those of this launch; the output is final for the own block
 * after the last barrier, and as a whole after the launch; it is not overwritten before it was
 * used; no deadlock. */

#include "memory.pml"
#include "signal.pml"

#ifndef SHOTS
#define SHOTS 2
#endif

byte arrived[N];
bool phase[N];

#ifdef BUG_FIRST_RELAXED
#define AT_FIRST RELAXED
#else
#define AT_FIRST ORDERED
#endif
#if SHOTS == 1 || defined(BUG_LAST_RELAXED)
#define AT_LAST RELAXED
#else
#define AT_LAST ORDERED
#endif

#ifdef BUG_READS_OTHER_BLOCK
#define BLOCK_TO_USE ((b + 1) % BLOCKS)
#else
#define BLOCK_TO_USE b
#endif
#ifdef BUG_BLOCK_SKIPS_LAST
#define HAS_LAST_BARRIER (b != BLOCKS - 1)
#else
#define HAS_LAST_BARRIER true
#endif

inline barrier(me, b, order) {
  target = ADD(epoch[BLOCK(me, b)], 1);
  atomic {
    for (peer : 0 .. N - 1) {
      if
      :: peer != me -> arrive(me, peer, b, target, order)
      :: else
      fi
    };
    peer = 0
  };
  do
  :: peer == N -> break
  :: peer == me -> peer++
  :: else -> wait_at_least(me, peer, b, target, order); peer++
  od;
  atomic { peer = 0; epoch[BLOCK(me, b)] = target; target = 0 }
}

inline first_barrier(me, b) {
#ifndef BUG_NO_FIRST_BARRIER
  barrier(me, b, AT_FIRST)
#else
  skip
#endif
}

inline last_barrier(me, b) {
#ifndef BUG_NO_LAST_BARRIER
  if
  :: HAS_LAST_BARRIER -> barrier(me, b, AT_LAST)
  :: else
  fi
#else
  skip
#endif
}

inline read_peers(me, b, version) {
  do
  :: peer == N -> break
  :: peer == me -> peer++
  :: else ->
    assert(LOADS_ONLY(version, view[PAIR(me, peer, b)], written[BLOCK(peer, b)]));
    peer++
  od;
  peer = 0
}

inline store_results(me, b) {
#if SHOTS == 2
  written[BLOCK(me, b)] = ADD(input, 1)
#else
  skip
#endif
}

inline use_output(me, b) {
#if SHOTS == 2
  read_peers(me, b, ADD(input, 1))
#else
  skip
#endif
}

inline write_input(me, version) {
  atomic {
    for (other : 0 .. BLOCKS - 1) {
      written[BLOCK(me, other)] = version
    };
    other = 0
  }
}

inline end_launch(me) {
  atomic { mine = phase[me]; arrived[me]++ };
  if
  :: atomic { arrived[me] == BLOCKS -> arrived[me] = 0 };
    do
    :: other == BLOCKS -> break
    :: else -> use_output(me, other); other++
    od;
    write_input(me, ADD(input, 2));
    phase[me] = !mine
  :: phase[me] != mine
  fi
}

proctype Block(byte me, b) {
  byte input = 1, target, peer, other;
  bool mine;
  do
  ::
#ifdef BUG_IDLE_BLOCK_RETURNS
    if
    :: me == 0 && b == BLOCKS - 1 -> goto returned
    :: else
    fi;
#endif
    first_barrier(me, b);
    read_peers(me, b, input);
    store_results(me, b);
    last_barrier(me, b);
    use_output(me, BLOCK_TO_USE);
#ifdef BUG_IDLE_BLOCK_RETURNS
returned:
#endif
progress:
    end_launch(me);
    input = ADD(input, 2)
  od
}

init {
  byte me, b;
  atomic {
    for (me : 0 .. N - 1) {
      for (b : 0 .. BLOCKS - 1) {
        written[BLOCK(me, b)] = 1;
        run Block(me, b)
      }
    }
  }
}
