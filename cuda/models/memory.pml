/* What the models assume of memory: counters that wrap around, stores that are seen late.
 *
 * A store is not an event in time but an entry in the history of its location; who polls the
 * location sees entries in their order, but as late as it likes, and may skip some (they were
 * overwritten before it looked). That is coherence, and nothing more: stores to different
 * locations, also those of one thread, are seen in any order. What restores an order is what
 * restores it on the device:
 *
 *   release  a fence before a store of a flag: the flag carries the version of the data that the
 *            fence covers;
 *   acquire  the load that sees the flag raises the reader's view to the version that it carries.
 *
 * A later read of the data returns any version from the reader's view to the last one written. So a
 * missing fence, and a load that is done too early, both show as an old version.
 */

#ifndef N
#define N 2  /* ranks */
#endif
#ifndef BLOCKS
#define BLOCKS 1
#endif
#ifndef M
#define M 8  /* Counters are modulo M here, modulo 2^32 on the device. `raise` needs at least 8. */
#endif

#define ADD(a, b) (((a) + (b)) % M)
#define SUB(a, b) (((a) + M - (b)) % M)
/* wait_at_least's compare: by the sign of the difference. */
#define AT_LEAST(seen, wanted) (SUB(seen, wanted) < M / 2)

/* A later one of the same location's versions. */
inline raise(version, to) {
  if
  :: AT_LEAST(to, version) -> version = to
  :: else
  fi
}

/* A load returns any version from the view to the last one written: all of them must be wanted. */
#define LOADS_ONLY(lowest, view, last) (SUB(view, lowest) <= 1 && SUB(last, lowest) <= 1)

/* __syncthreads() of `count` threads, and likewise the end of a launch, which all its blocks reach
 * before the next one starts. `arrived` and `phase` are shared, `mine` is the caller's own. */
inline sync(arrived, phase, mine, count) {
  atomic {
    mine = phase;
    arrived++;
    if
    :: arrived == count -> arrived = 0; phase = !phase
    :: else
    fi
  }
  (phase != mine)
}
