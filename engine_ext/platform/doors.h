/* Doors: event counts in memory that processes share, on which threads sleep.
 *
 * Who wants to sleep reads the count, says so where others look, looks once more whether there is anything to do, and sleeps at
 * the count that it has read. Who brings something rings: the count moves, so that a sleep which has not begun yet does not
 * begin. Every sleep of a thread of the engine, and every ring, goes through here.
 */
#ifndef ENGINE_PLATFORM_DOORS_H
#define ENGINE_PLATFORM_DOORS_H

#include "atomics.h"

enum { DOOR_EVERYBODY = 1 << 30 }; /* for door_ring: all that sleep at the door */

static inline uint32_t door_count(const uint32_t *door) { return load32_acquire(door); }

/* Sleep until the door is rung, at most timeout_ns (0: no limit). Returns at once if the count is no longer `count`, and early
 * for signals: callers look again. */
static inline void door_sleep(uint32_t *door, uint32_t count, uint64_t timeout_ns) { futex_wait(door, count, timeout_ns); }

/* Wake as many of those that sleep at the door. */
static inline void door_ring(uint32_t *door, int sleepers) {
  add32(door, 1); /* pairs with the count given to door_sleep */
  futex_wake(door, sleepers);
}

#endif
