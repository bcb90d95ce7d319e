/* Ages of events, and the time for which a process has been running.
 *
 * Every comparison of two times goes through age_ns and overdue_ns. Monotonic time begins when the machine boots, so `now -
 * limit` wraps on a machine that has been up for less than the limit; an age never does.
 *
 * A limit on progress must not count time in which this process was suspended, since the ranks that it waits for were usually
 * suspended too. No kernel clock leaves out the time for which a process was stopped or frozen. So each process keeps a
 * *patience*, its running time: the monotonic time between looks that came in time. A thread that watches a limit looks at least
 * every half `step`. A look more than a step after the previous one reveals a suspension; then neither that time nor the next step
 * counts. So other ranks have a step to go on before they are accused.
 */
#ifndef ENGINE_PLATFORM_CLOCK_H
#define ENGINE_PLATFORM_CLOCK_H

#include "atomics.h"

/* Return the age of `then`; 0 if it lies in the future. */
static inline uint64_t age_ns(uint64_t now, uint64_t then) { return now > then ? now - then : 0; }

/* Return whether `then` is at least `limit` ago. A limit of 0 never expires. */
static inline int overdue_ns(uint64_t now, uint64_t then, uint64_t limit) { return limit != 0 && age_ns(now, then) >= limit; }

/* Return `ns` after `then`; UINT64_MAX on overflow. */
static inline uint64_t after_ns(uint64_t then, uint64_t ns) { return then + ns < then ? UINT64_MAX : then + ns; }

/* Convert a setting in seconds to nanoseconds; UINT64_MAX if it is too large, 0 if it is negative or NaN. */
static inline uint64_t seconds_ns(double seconds) {
  if (!(seconds > 0)) return 0;
  return seconds < 1.8e10 ? (uint64_t)(seconds * 1e9) : UINT64_MAX;
}

/* A process's clock: a seqlock over two looks, of which `look[turn & 1]` is valid. A look is overwritten two turns later, so
 * readers check that `turn` is unchanged. The thread that changes `busy` from 0 to 1 is the writer. */
typedef struct patience {
  uint64_t step;                          /* nanoseconds: longest time between two looks that counts */
  uint32_t turn, busy;                    /* atomic: number of looks; 1: a thread is writing */
  struct { uint64_t at, seen; } look[2];  /* nanoseconds: monotonic time; running time up to it */
} patience;

/* Initialize a clock, before other threads use it. */
static inline void patience_open(patience *p, uint64_t step) {
  p->step = step;
  p->turn = p->busy = 0;
  p->look[0].at = p->look[0].seen = now_ns();
}

/* Read the last look: its monotonic time and the running time up to it. */
static inline void patience_last(const patience *p, uint64_t *at, uint64_t *seen) {
  uint32_t turn;
  do {
    turn = __atomic_load_n(&p->turn, __ATOMIC_ACQUIRE);         /* pairs with patience_look */
    *at = __atomic_load_n(&p->look[turn & 1].at, __ATOMIC_RELAXED);
    *seen = __atomic_load_n(&p->look[turn & 1].seen, __ATOMIC_RELAXED);
    acquire_fence(FENCE_LOOK);                                  /* look before turn is read again */
  } while (__atomic_load_n(&p->turn, __ATOMIC_RELAXED) != turn);
}

/* Convert the monotonic time `now` to running time: the time to store for an event whose age is compared with a limit. */
static inline uint64_t patience_at(const patience *p, uint64_t now) {
  uint64_t at, seen, age;
  patience_last(p, &at, &seen);
  age = age_ns(now, at);
  return seen + (age < p->step ? age : p->step);
}

/* Look, and return the running time so far: the time to compare with a limit. */
static inline uint64_t patience_look(patience *p) {
  uint64_t at, seen, now, age;
  uint32_t next;
  if (__atomic_exchange_n(&p->busy, 1, __ATOMIC_ACQUIRE) == 0) {        /* pairs with the release below */
    patience_last(p, &at, &seen);
    now = now_ns();
    age = age_ns(now, at);
    if (age != 0) {
      next = p->turn + 1;
      release_fence(FENCE_TURN);                /* the last turn before these words: who reads one of them sees that turn */
      __atomic_store_n(&p->look[next & 1].at, age <= p->step ? now : now + p->step, __ATOMIC_RELAXED);
      __atomic_store_n(&p->look[next & 1].seen, age <= p->step ? seen + age : seen, __ATOMIC_RELAXED);
      __atomic_store_n(&p->turn, next, __ATOMIC_RELEASE);               /* pairs with patience_last: both words are in place */
    }
    __atomic_store_n(&p->busy, 0, __ATOMIC_RELEASE);
  }
  patience_last(p, &at, &seen);
  return seen;
}

#endif
