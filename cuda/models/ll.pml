/* The one-shot exchange by lines of data and flag, over and over (all_reduce_one_shot_ll.cu).
 *
 * A rank's scratch holds, for each of two halves and each sender, LINES lines of two words {data,
 * flag}; a word arrives whole, a line need not. In exchange e a rank stores its input to all peers
 * in the half of e's parity, with e as the flag, and polls its own lines until both flags are e. No
 * barrier, no clearing. How many lines an exchange has varies from call to call, at least one.
 *
 * Why a half may be used again: a rank that stores e + 2 has received lines e + 1 of all peers, and
 * these sent them after they had read e.
 *
 * Why a flag cannot be one of 2^32 exchanges ago, in a line that small exchanges did not touch since:
 * twice a lap two exchanges, one a half, have all lines. Once a lap is too seldom: the flag of the
 * last full exchange would be the stale one that the next full exchange finds. A line never written
 * has 0, which is no flag before the first of them.
 *
 * Proved: who leaves the poll has the data of its own exchange, both words of it; no deadlock; the
 * same for flags that wrap around. */

#include "memory.pml"

#ifndef LINES
#define LINES 1
#endif

/* Exchanges are counted over two laps of the flag, so that data of a lap ago are told from today's. */
#define CALLS (2 * M)
#define FLAG(call) ((call) % M)

#if defined(BUG_ONE_HALF)
#define HALF(call) 0
#elif defined(BUG_ZERO_SKIPPED)
#define HALF(call) (flag % 2)
#else
#define HALF(call) ((call) % 2)
#endif
#ifdef BUG_HALVES_BY_SIZE
#define LINE(call, i) (HALF(call) * lines + (i))
#else
#define LINE(call, i) (HALF(call) * LINES + (i))
#endif

#if defined(BUG_NEVER_ALL_LINES)
#define HAS_ALL_LINES(flag) false
#elif defined(BUG_ALL_LINES_ONCE_A_LAP)
#define HAS_ALL_LINES(flag) ((flag) >= M - 2)
#else
#define HAS_ALL_LINES(flag) ((flag) % (M / 2) >= M / 2 - 2)
#endif

/* Of what `from` stores into the scratch of `to`. */
#define WORD(to, from, line, word) ((((to) * N + (from)) * 2 * LINES + (line)) * 2 + (word))
#define NUM_WORDS (N * N * 2 * LINES * 2)

/* Stores {call, flag} that the receiver has not seen yet, and what it saw last. */
chan on_the_way[NUM_WORDS] = [2] of { byte, byte };
byte data[NUM_WORDS];
byte flags[NUM_WORDS];

/* How many lines an exchange has: whoever comes first says it for all. By parity, as nobody is more
 * than one exchange ahead. */
byte num_lines[2];
byte decided_for[2];

inline decide_lines(call, lines) {
  atomic {
    if
    :: decided_for[call % 2] == call
    :: else ->
      decided_for[call % 2] = call;
#ifdef BUG_EMPTY_EXCHANGE
      num_lines[call % 2] = 0;
#else
      num_lines[call % 2] = 1;
#endif
      do
      :: num_lines[call % 2] < LINES -> num_lines[call % 2]++
      :: break
      od
    fi;
    lines = num_lines[call % 2];
    if
    :: HAS_ALL_LINES(flag) -> lines = LINES
    :: else
    fi
  }
}

inline store(word, call, flag) {
  assert(nfull(on_the_way[word]));
  on_the_way[word] ! call, flag
}

/* All in one step: each word is seen when its receiver looks. */
inline send(me, call, flag, lines) {
  atomic {
    for (peer : 0 .. N - 1) {
      for (i : 0 .. lines - 1) {
        if
        :: peer != me ->
          store(WORD(peer, me, LINE(call, i), 0), call, flag);
          store(WORD(peer, me, LINE(call, i), 1), call, flag)
        :: else
        fi
      }
    };
    peer = 0;
    i = 0
  }
}

#ifdef BUG_SECOND_FLAG_UNCHECKED
#define COMPLETE(word, flag) (flags[word] == flag)
#elif defined(BUG_FLAG_ONLY_NONZERO)
#define COMPLETE(word, flag) (flags[word] != 0 && flags[(word) + 1] != 0)
#else
#define COMPLETE(word, flag) (flags[word] == flag && flags[(word) + 1] == flag)
#endif

inline see(word) {
  on_the_way[word] ? data[word], flags[word]
}

inline poll(word, call, flag) {
  do
  :: see(word)
  :: see(word + 1)
  :: atomic {
      COMPLETE(word, flag) ->
      assert(data[word] == call && data[word + 1] == call)
    };
    break
  od
}

#ifdef BUG_READS_ROOT_ONLY
#define READS(me, peer) ((peer) == 0 && (me) != 0)
#else
#define READS(me, peer) ((peer) != (me))
#endif

inline receive(me, call, flag, lines) {
  do
  :: peer == N -> break
  :: peer < N && !READS(me, peer) -> peer++
  :: peer < N && READS(me, peer) && i == lines -> i = 0; peer++
  :: peer < N && READS(me, peer) && i < lines ->
    poll(WORD(me, peer, LINE(call, i), 0), call, flag);
    i++
  od;
  peer = 0
}

proctype Rank(byte me) {
  byte call, flag, peer, i, lines;
#ifdef BUG_STARTS_AT_ZERO
  call = M - 1; flag = M - 1;
#endif
  do
  :: d_step {
      call = (call + 1) % CALLS;
      flag = ADD(flag, 1);
#ifdef BUG_ZERO_SKIPPED
      if
      :: flag == 0 -> flag = 1
      :: else
      fi
#endif
    };
    decide_lines(call, lines);
    send(me, call, flag, lines);
    receive(me, call, flag, lines);
progress:
    lines = 0
  od
}

init {
  byte me;
  atomic {
    for (me : 0 .. N - 1) {
      run Rank(me)
    }
  }
}
