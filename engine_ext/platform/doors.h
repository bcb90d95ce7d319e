/* Doors: event counts in memory that processes share, on which threads sleep.
 *
 * A thread that wants to sleep reads the count, announces its sleep to the others, checks once more for work, and sleeps at the
 * count that it read. A thread with news rings the door. That moves the count, so that a sleep which has not begun yet does not
 * begin. Every sleep of a thread of the engine, and every ring, goes through here.
 */
#ifndef ENGINE_PLATFORM_DOORS_H
#define ENGINE_PLATFORM_DOORS_H

#include "atomics.h"

enum { DOOR_EVERYBODY = 1 << 30 }; /* for door_ring: wake all sleepers */

/* Return the count to pass to door_sleep. Pairs with door_ring. */
static inline uint32_t door_count(const uint32_t *door) { return load32_acquire(door); }

/* Sleep until the door is rung, for at most timeout_ns (0: no limit). Returns at once if the count is no longer `count`, and
 * early for signals, so callers check again. */
static inline void door_sleep(uint32_t *door, uint32_t count, uint64_t timeout_ns) { futex_wait(door, count, timeout_ns); }

/* Ring the door: wake at most `sleepers` of the threads that sleep at it. */
static inline void door_ring(uint32_t *door, int sleepers) {
  add32(door, 1); /* pairs with the acquire in door_count */
  futex_wake(door, sleepers);
}

#endif
