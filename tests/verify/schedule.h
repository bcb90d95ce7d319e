/* Put before every source of a build (-include): each access to a shared word, lock, futex and clock asks the scheduler first,
 * which lets one thread run at a time. schedule.c is that scheduler. Such a build is for tests/verify/interleave.py alone. */
#ifndef SCHEDULE_H
#define SCHEDULE_H

#include "../../engine_ext/platform/atomics.h"
#include "one_mapping.h"

void schedule_point(const char *what, const char *where, const void *word);
void schedule_wait(uint32_t *word, uint32_t expected, uint64_t timeout_ns, const char *where);
void schedule_wake(uint32_t *word, int most, const char *where);
uint64_t schedule_now(void);
int schedule_lock(pthread_mutex_t *mutex, const char *where);
int schedule_unlock(pthread_mutex_t *mutex, const char *where);
int schedule_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*start)(void *), void *argument);
int schedule_join(pthread_t thread, void **result);

#define load_relaxed(p) (schedule_point("load", __func__, p), load_relaxed(p))
#define load_acquire(p) (schedule_point("load", __func__, p), load_acquire(p))
#define store_relaxed(p, v) (schedule_point("store", __func__, p), store_relaxed(p, v))
#define store_release(p, v) (schedule_point("store", __func__, p), store_release(p, v))
#define load32_relaxed(p) (schedule_point("load", __func__, p), load32_relaxed(p))
#define load32_acquire(p) (schedule_point("load", __func__, p), load32_acquire(p))
#define store32_relaxed(p, v) (schedule_point("store", __func__, p), store32_relaxed(p, v))
#define store32_release(p, v) (schedule_point("store", __func__, p), store32_release(p, v))
#define add32(p, v) (schedule_point("add", __func__, p), add32(p, v))
#define or32(p, v) (schedule_point("or", __func__, p), or32(p, v))
#define cas(p, old, v) (schedule_point("cas", __func__, p), cas(p, old, v))
#define cas32(p, old, v) (schedule_point("cas", __func__, p), cas32(p, old, v))
#define futex_wait(word, expected, timeout_ns) schedule_wait(word, expected, timeout_ns, __func__)
#define futex_wake(word, count) schedule_wake(word, count, __func__)
#define now_ns() schedule_now()
#define pthread_mutex_lock(mutex) schedule_lock(mutex, __func__)
#define pthread_mutex_unlock(mutex) schedule_unlock(mutex, __func__)
#define pthread_create(thread, attributes, start, argument) schedule_create(thread, attributes, start, argument)
#define pthread_join(thread, result) schedule_join(thread, result)
#endif
