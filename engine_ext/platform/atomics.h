/* Atomic words in memory that processes share, and the kernel's futex.
 *
 * These are plain pointers with the compiler's __atomic built-ins, since C and Cython use the same words. Each call site says
 * what a release or acquire pairs with.
 */
#ifndef ENGINE_PLATFORM_ATOMICS_H
#define ENGINE_PLATFORM_ATOMICS_H

#include "fences.h"

#include <errno.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static inline uint64_t load_relaxed(const uint64_t *p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
static inline uint64_t load_acquire(const uint64_t *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
static inline void store_relaxed(uint64_t *p, uint64_t v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
static inline void store_release(uint64_t *p, uint64_t v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }

/* Add to a statistic. If two threads add at the same time, one addition may get lost. */
static inline void count_up(uint64_t *p, uint64_t n) { store_relaxed(p, load_relaxed(p) + n); }

static inline uint32_t load32_relaxed(const uint32_t *p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
static inline uint32_t load32_acquire(const uint32_t *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
static inline void store32_relaxed(uint32_t *p, uint32_t v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
static inline void store32_release(uint32_t *p, uint32_t v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
static inline uint64_t add64(uint64_t *p, uint64_t v) { return __atomic_fetch_add(p, v, __ATOMIC_ACQ_REL); }
static inline uint32_t add32(uint32_t *p, uint32_t v) { return __atomic_fetch_add(p, v, __ATOMIC_ACQ_REL); }
static inline uint32_t and32(uint32_t *p, uint32_t v) { return __atomic_fetch_and(p, v, __ATOMIC_ACQ_REL); }
static inline uint32_t or32(uint32_t *p, uint32_t v) { return __atomic_fetch_or(p, v, __ATOMIC_ACQ_REL); }

/* Both replace `old` by `v` if the word is `old`, and return whether they did. */
static inline int cas(uint64_t *p, uint64_t old, uint64_t v) {
  return __atomic_compare_exchange_n(p, &old, v, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
}
static inline int cas32(uint32_t *p, uint32_t old, uint32_t v) {
  return __atomic_compare_exchange_n(p, &old, v, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
}
/* Pointers: loads acquire, stores release, and the other two do both. */
static inline void *load_pointer(void *const *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
static inline void store_pointer(void **p, void *v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
static inline void *swap_pointer(void **p, void *v) { return __atomic_exchange_n(p, v, __ATOMIC_ACQ_REL); }
static inline int cas_pointer(void **p, void *old, void *v) {
  return __atomic_compare_exchange_n(p, &old, v, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
}

/* Tell the processor that the caller spins. */
static inline void spin_pause(void) {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ __volatile__("isb" ::: "memory");
#endif
}

/* Yield this processor to other threads that are ready. No wait may rely on it: without such threads it returns at once. */
static inline void yield_processor(void) { sched_yield(); }

/* Return CLOCK_MONOTONIC in nanoseconds. */
static inline uint64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* Sleep while *word == expected, for at most timeout_ns (0: no limit). Signals wake it early, so callers check again. */
static inline void futex_wait(uint32_t *word, uint32_t expected, uint64_t timeout_ns) {
  struct timespec t = {(time_t)(timeout_ns / 1000000000u), (long)(timeout_ns % 1000000000u)};
  syscall(SYS_futex, word, FUTEX_WAIT, expected, timeout_ns ? &t : NULL, NULL, 0);
}
/* Wake at most `count` threads that sleep on the word. */
static inline void futex_wake(uint32_t *word, int count) { syscall(SYS_futex, word, FUTEX_WAKE, count, NULL, NULL, 0); }

#endif
