/* ErrorRecord (cuda/kernels/peer_table.h): WRITERS threads give up at about the same time, the host
 * polls. The fields are in host memory and are seen late; the release store of the last state
 * carries them.
 *
 * Proved: what the host reads are the fields of one thread, all of them; every thread comes to an
 * end. */

#ifndef WRITERS
#define WRITERS 3
#endif
#define NOBODY WRITERS

#define FREE 0
#define CLAIMED 1
#define COMPLETE 2

byte state;
/* Two fields stand for all. The last value, and the one that the host is sure to see. */
byte peer = NOBODY, sure_peer = NOBODY;
byte seen = NOBODY, sure_seen = NOBODY;

inline publish() {
  d_step {
#ifndef BUG_STATE_NOT_RELEASED
    sure_peer = peer;
    sure_seen = seen;
#endif
    state = COMPLETE
  }
}

proctype Writer(byte me) {
  if
#ifdef BUG_NOT_CLAIMED
  :: state == FREE -> state = CLAIMED;
#else
  :: d_step { state == FREE -> state = CLAIMED };
#endif
#ifdef BUG_PUBLISHED_EARLY
    publish();
    peer = me;
    seen = me
#else
    peer = me;
    seen = me;
    publish()
#endif
  :: state != FREE
  fi
}

active proctype Host() {
  state == COMPLETE;
  assert(sure_peer != NOBODY && sure_peer == peer && sure_seen == seen && peer == seen)
}

init {
  byte me;
  atomic {
    for (me : 0 .. WRITERS - 1) {
      run Writer(me)
    }
  }
}
