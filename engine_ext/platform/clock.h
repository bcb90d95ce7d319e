/* Ages, and the time that a process has seen pass.
 *
 * Every comparison of two times goes through age_ns and overdue_ns. Monotonic time begins when the machine boots, so
 * `now - limit` wraps on a machine that has been up for less than the limit; an age never does.
 *
 * A limit on progress must not count time in which this process was suspended: with it, as a rule, the ranks that it waits
 * for were. No clock of the kernel leaves out the time for which a process was stopped or frozen, so a process keeps a
 * *patience*: the monotonic time that has passed between looks which came in time. Whoever watches a limit looks, at least
 * every half `step`; a look that comes later than a step after the last one tells of a suspension, and neither that time nor
 * the next step counts. So the others have a step to go on before anybody accuses them.
 */
#ifndef ENGINE_PLATFORM_CLOCK_H
#define ENGINE_PLATFORM_CLOCK_H

#include "atomics.h"

/* How long ago `then` was; 0 for what is yet to come. */
static inline uint64_t age_ns(uint64_t now, uint64_t then) { return now > then ? now - then : 0; }

/* Whether `then` is at least `limit` ago. A limit of 0 is never over. */
static inline int overdue_ns(uint64_t now, uint64_t then, uint64_t limit) { return limit != 0 && age_ns(now, then) >= limit; }

/* `ns` after `then`; the end of time if there is no such number. */
static inline uint64_t after_ns(uint64_t then, uint64_t ns) { return then + ns < then ? UINT64_MAX : then + ns; }

/* Seconds of a setting in nanoseconds; the end of time for more than there can be. */
static inline uint64_t seconds_ns(double seconds) {
  if (!(seconds > 0)) return 0;
  return seconds < 1.8e10 ? (uint64_t)(seconds * 1e9) : UINT64_MAX;
}

/* Two looks, of which `turn & 1` is the one that counts. Readers take it and look whether `turn` is still the same: it is written
 * again two turns later. Whoever sets `busy` from 0 to 1 writes. */
typedef struct patience {
  uint64_t step;
  uint32_t turn, busy;
  struct { uint64_t at, seen; } look[2];
} patience;

static inline void patience_open(patience *p, uint64_t step) {
  p->step = step;
  p->turn = p->busy = 0;
  p->look[0].at = p->look[0].seen = now_ns();
}

/* When this process was last looked at, by the monotonic clock, and what it had seen then. */
static inline void patience_last(const patience *p, uint64_t *at, uint64_t *seen) {
  uint32_t turn;
  do {
    turn = __atomic_load_n(&p->turn, __ATOMIC_ACQUIRE);         /* pairs with patience_look */
    *at = __atomic_load_n(&p->look[turn & 1].at, __ATOMIC_RELAXED);
    *seen = __atomic_load_n(&p->look[turn & 1].seen, __ATOMIC_RELAXED);
    acquire_fence(FENCE_LOOK);                                  /* the look before the turn is read again */
  } while (__atomic_load_n(&p->turn, __ATOMIC_RELAXED) != turn);
}

/* The monotonic time `now` by the time that this process has seen pass: what to remember of an event whose age is to be compared
 * with a limit. */
static inline uint64_t patience_at(const patience *p, uint64_t now) {
  uint64_t at, seen, age;
  patience_last(p, &at, &seen);
  age = age_ns(now, at);
  return seen + (age < p->step ? age : p->step);
}

/* Look, and return what this process has seen pass so far: what to compare with a limit. */
static inline uint64_t patience_look(patience *p) {
  uint64_t at, seen, now, age;
  uint32_t next;
  if (__atomic_exchange_n(&p->busy, 1, __ATOMIC_ACQUIRE) == 0) {        /* pairs with the release below */
    patience_last(p, &at, &seen);
    now = now_ns();
    age = age_ns(now, at);
    if (age != 0) {
      next = p->turn + 1;
      release_fence(FENCE_TURN);                /* the turn before these words: who reads one of them sees that it was over */
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
