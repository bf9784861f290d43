/* The barrier of SignalPad (cuda/kernels/peer_table.h, signal.cuh): block b of every rank meets the
 * peers' block b. To arrive is to store one's epoch + 1 into inbox[b][me] of the peer's pad; to
 * wait, to poll one's own inbox[b][peer] for at least that. */

#define BLOCK(rank, b) ((rank) * BLOCKS + (b))
#define PAIR(rank, peer, b) (((rank) * N + (peer)) * BLOCKS + (b))

#define RELAXED 0
#define ORDERED 1  /* release on arrival, acquire in the wait */

byte epoch[N * BLOCKS];

/* The data that block b of a rank writes for its peers, all of it one location with versions. */
byte written[N * BLOCKS];
byte fenced[N * BLOCKS];         /* The version that the block's last fence covers. */
byte view[N * N * BLOCKS];       /* PAIR(reader, writer, b) */

/* PAIR(owner, sender, b): stores on their way into the owner's inbox, {epoch, version}, and what
 * the owner saw last. A peer is at most one barrier ahead, so that two are enough: arrive() asserts
 * it. */
chan on_the_way[N * N * BLOCKS] = [2] of { byte, byte };
byte inbox[N * N * BLOCKS];
byte carried[N * N * BLOCKS];

#ifdef BUG_WRONG_INBOX
#define SLOT(owner, sender, b) PAIR(owner, owner, b)
#else
#define SLOT(owner, sender, b) PAIR(owner, sender, b)
#endif

#if defined(BUG_EQUALITY)
#define REACHED(seen, wanted) ((seen) == (wanted))
#elif defined(BUG_UNSIGNED_COMPARE)
#define REACHED(seen, wanted) ((seen) >= (wanted))
#elif defined(BUG_WAITS_FOR_OLD_EPOCH)
#define REACHED(seen, wanted) AT_LEAST(seen, SUB(wanted, 1))
#else
#define REACHED(seen, wanted) AT_LEAST(seen, wanted)
#endif

/* A fence is cumulative over the block's threads by the sync before it, and stays good for every
 * store after it: a relaxed flag carries what an earlier fence covered. */
inline arrive(me, peer, b, target, order) {
  atomic {
#ifndef BUG_NO_RELEASE
    if
    :: order == ORDERED -> fenced[BLOCK(me, b)] = written[BLOCK(me, b)]
    :: else
    fi;
#endif
    assert(nfull(on_the_way[SLOT(peer, me, b)]));
    on_the_way[SLOT(peer, me, b)] ! target, fenced[BLOCK(me, b)]
  }
}

/* One more store to the owner's inbox is seen. */
inline see(me, peer, b) {
  on_the_way[PAIR(me, peer, b)] ? inbox[PAIR(me, peer, b)], carried[PAIR(me, peer, b)]
}

inline acquire(me, peer, b, order) {
#ifndef BUG_NO_ACQUIRE
  if
  :: order == ORDERED -> raise(view[PAIR(me, peer, b)], carried[PAIR(me, peer, b)])
  :: else
  fi
#else
  skip
#endif
}

/* Both ways may be open: a poll that comes late finds the next epoch where the wanted one was. */
inline wait_at_least(me, peer, b, target, order) {
  do
  :: see(me, peer, b)
  :: atomic { REACHED(inbox[PAIR(me, peer, b)], target) -> acquire(me, peer, b, order) }; break
  od
}
