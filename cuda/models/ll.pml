/* The one-shot exchange by lines of data and flag, over and over (all_reduce_one_shot_ll.cu).
 *
 * A block's scratch holds, for each of two halves and each sender, LINES lines of two words {data,
 * flag}; a word arrives whole, a line need not. In an exchange a rank stores its input to all
 * peers, in the half of its flag's parity, and polls its own lines until both flags are the
 * exchange's. No barrier. How many lines an exchange has varies from call to call; at least one.
 *
 * Why a half may be used again: a rank that begins exchange e + 2 has received the lines of e + 1
 * of all peers, and these sent them after they had read e.
 *
 * Flags count up, 0 is what a line has that was never written. When they wrap around, lines that
 * small exchanges did not touch may have the flag of a lap ago: every rank cleans its lines, and a
 * barrier lets no peer write to them before. The next flag is 2, as in BlockSync::NextLines.
 *
 * Proved: who leaves the poll has the data of its own exchange, both words of it; no deadlock; the
 * same for flags that wrap around. */

#include "memory.pml"

#ifndef LINES
#define LINES 1
#endif

/* Exchanges are counted over two laps of the flag, so that data of a lap ago are told from today's.
 * */
#define CALLS (2 * (M - 2))

#ifdef BUG_EPOCH_BEFORE
#define FLAG SUB(line_epoch, 1)
#else
#define FLAG line_epoch
#endif
#ifdef BUG_ONE_HALF
#define HALF 0
#else
#define HALF (FLAG % 2)
#endif
#ifdef BUG_HALVES_BY_SIZE
#define LINE(i) (HALF * lines + (i))
#else
#define LINE(i) (HALF * LINES + (i))
#endif

/* Of what `from` stores into the scratch of `to`. */
#define WORD(to, from, line, word) ((((to) * N + (from)) * 2 * LINES + (line)) * 2 + (word))
#define WORDS_OF_A_RANK (N * 2 * LINES * 2)

/* Stores {call, flag} that the receiver has not seen yet, and what it saw last. */
chan on_the_way[N * WORDS_OF_A_RANK] = [2] of { byte, byte };
byte data[N * WORDS_OF_A_RANK];
byte flags[N * WORDS_OF_A_RANK];

/* How many lines an exchange has: whoever comes first says it for all. By parity, as nobody is more
 * than one exchange ahead. */
byte num_lines[2];
byte decided_for[2] = CALLS;

/* The barrier after the cleaning, proved in barrier.pml and perfect here. The one before it, which
 * the kernel has too, is not needed for what is proved here. */
byte arrived;
bool phase;

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
    lines = num_lines[call % 2]
  }
}

/* A peer's store that was not seen yet comes before this one or after it. */
inline clean(me) {
  atomic {
    for (word : me * WORDS_OF_A_RANK .. (me + 1) * WORDS_OF_A_RANK - 1) {
      do
      :: on_the_way[word] ? data[word], flags[word]
      :: break
      od;
      data[word] = 0;
      flags[word] = 0
    };
    word = 0
  }
}

inline next_flag(me) {
  line_epoch = ADD(line_epoch, 1);
  if
  :: line_epoch == 0 ->
#ifndef BUG_NOT_CLEANED
    clean(me);
#endif
#ifndef BUG_NO_BARRIER_AFTER_CLEANING
    sync(arrived, phase, my_phase, N);
#endif
    line_epoch = 2
  :: else
  fi
}

inline store(word) {
  assert(nfull(on_the_way[word]));
  on_the_way[word] ! call, FLAG
}

/* All in one step: each word is seen when its receiver looks. */
inline send(me) {
  atomic {
    for (peer : 0 .. N - 1) {
      for (i : 0 .. lines - 1) {
        if
        :: peer != me ->
          store(WORD(peer, me, LINE(i), 0));
          store(WORD(peer, me, LINE(i), 1))
        :: else
        fi
      }
    };
    peer = 0;
    i = 0
  }
}

#ifdef BUG_SECOND_FLAG_UNCHECKED
#define HAS_FLAG(word) (flags[word] == FLAG)
#elif defined(BUG_ANY_FLAG)
#define HAS_FLAG(word) (flags[word] != 0 && flags[(word) + 1] != 0)
#else
#define HAS_FLAG(word) (flags[word] == FLAG && flags[(word) + 1] == FLAG)
#endif

inline see(word) {
  on_the_way[word] ? data[word], flags[word]
}

inline poll(word) {
  do
  :: see(word)
  :: see(word + 1)
  :: atomic { HAS_FLAG(word) -> assert(data[word] == call && data[word + 1] == call) }; break
  od
}

#ifdef BUG_READS_ROOT_ONLY
#define READS(me, peer) ((peer) == 0 && (me) != 0)
#else
#define READS(me, peer) ((peer) != (me))
#endif

inline receive(me) {
  do
  :: peer == N -> break
  :: peer < N && !READS(me, peer) -> peer++
  :: peer < N && READS(me, peer) && i == lines -> i = 0; peer++
  :: peer < N && READS(me, peer) && i < lines -> poll(WORD(me, peer, LINE(i), 0)); i++
  od;
  peer = 0
}

proctype Rank(byte me) {
  byte call, line_epoch, lines, peer, i, word;
  bool my_phase;
  do
  :: call = (call + 1) % CALLS;
    next_flag(me);
    decide_lines(call, lines);
    send(me);
    receive(me);
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
