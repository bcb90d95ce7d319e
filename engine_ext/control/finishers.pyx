"""Finishers: the threads on which native calls end (engine_ext/bindings/calls.h).

What a call's end sets off belongs to the framework: it may run the rest of a program, and wait there for other collectives. So
whoever drives only puts the finished operation on a queue, and a finisher takes it from there. Finishers hold neither a lock
nor the driver's role nor the GIL while they call. Signals are not delivered to them, and they begin each call with the default
floating-point state.

When something is on the queue and no finisher has come back for PATIENCE_NS, another one is started, since each may be waiting
for what the next brings. A thread of its own, the guard, sees to that: all finishers may be blocked, and whoever drives would
start one for each of a thousand operations that end together. Finishers that have had nothing to do for IDLE_SECONDS end, but
for one.

The queue belongs to the process: a callback may outlive the engine whose call it ends.
"""
from libc.stdint cimport uint64_t

from engine_ext.operations.op cimport Op
from engine_ext.platform.posix cimport (
    CLOCK_MONOTONIC, clock_gettime, engine_thread_start, nanosleep, pthread_cond_init, pthread_cond_signal, pthread_cond_t,
    pthread_cond_timedwait, pthread_cond_wait, pthread_condattr_init, pthread_condattr_setclock, pthread_condattr_t,
    pthread_mutex_init, pthread_mutex_lock, pthread_mutex_t, pthread_mutex_unlock, timespec,
)

cdef extern from "platform/cpu.h" nogil:
    uint64_t engine_float_enter()

cdef enum:
    IDLE_SECONDS = 5
    PATIENCE_NS = 1000000

cdef struct Finishers:
    pthread_mutex_t lock
    pthread_cond_t news         # there is something on the queue
    pthread_cond_t crowded      # more is on the queue than finishers are idle
    Op* first                   # the queue, by `next`: operations that are done, oldest first
    Op* last
    int threads                 # that there are
    int idle                    # of these, how many wait for news
    int queued                  # operations on the queue
    uint64_t taken              # operations that were ever taken from it
    bint guarded                # whether there is a guard

cdef Finishers pool


cdef void* finisher(void* unused) noexcept nogil:
    cdef timespec until
    cdef bint waited = False
    cdef Op* op
    pthread_mutex_lock(&pool.lock)
    while True:
        if pool.first != NULL:
            op = pool.first
            pool.first = op.next
            pool.queued -= 1
            pool.taken += 1
            waited = False
            pthread_mutex_unlock(&pool.lock)
            engine_float_enter()        # the thread that started this one, or the last call, may have left another state
            op.finished(op)
            pthread_mutex_lock(&pool.lock)
        elif waited and pool.threads > 1:
            break
        else:
            clock_gettime(CLOCK_MONOTONIC, &until)
            until.tv_sec += IDLE_SECONDS
            pool.idle += 1
            waited = pthread_cond_timedwait(&pool.news, &pool.lock, &until) != 0
            pool.idle -= 1
    pool.threads -= 1
    pthread_mutex_unlock(&pool.lock)
    return NULL


cdef void* guard(void* unused) noexcept nogil:
    """Start another finisher whenever something waits for one and none has come back for PATIENCE_NS."""
    cdef timespec patience
    cdef uint64_t taken
    patience.tv_sec, patience.tv_nsec = 0, PATIENCE_NS
    pthread_mutex_lock(&pool.lock)
    while True:
        while pool.queued <= pool.idle:
            pthread_cond_wait(&pool.crowded, &pool.lock)
        taken = pool.taken
        pthread_mutex_unlock(&pool.lock)
        nanosleep(&patience, NULL)
        pthread_mutex_lock(&pool.lock)
        if pool.queued > pool.idle and pool.taken == taken:
            pool.threads += engine_thread_start(NULL, finisher, NULL) == 0
    return NULL


cdef bint finishers_start() noexcept nogil:
    """See to it that there are a finisher and a guard: whether there are. Called before every submission that may need them."""
    cdef bint there
    pthread_mutex_lock(&pool.lock)
    if pool.threads == 0:
        pool.threads += engine_thread_start(NULL, finisher, NULL) == 0
    if not pool.guarded:
        pool.guarded = engine_thread_start(NULL, guard, NULL) == 0
    there = pool.threads > 0 and pool.guarded
    pthread_mutex_unlock(&pool.lock)
    return there


cdef void finishers_add(Op* op) noexcept nogil:
    """Have an operation ended, which is done. There is a finisher; if no other can be started, the next that is free takes it."""
    pthread_mutex_lock(&pool.lock)
    op.next = NULL
    if pool.first != NULL:
        pool.last.next = op
    else:
        pool.first = op
    pool.last = op
    pool.queued += 1
    if pool.queued > pool.idle:
        pthread_cond_signal(&pool.crowded)
    pthread_cond_signal(&pool.news)
    pthread_mutex_unlock(&pool.lock)


cdef void finishers_forked() noexcept nogil:
    """A forked child has none of the threads, and what they were about to end is the parent's. Also the first beginning."""
    cdef pthread_condattr_t attributes
    pthread_mutex_init(&pool.lock, NULL)
    pthread_condattr_init(&attributes)
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC)
    pthread_cond_init(&pool.news, &attributes)
    pthread_cond_init(&pool.crowded, &attributes)
    pool.first = pool.last = NULL
    pool.threads = pool.idle = pool.queued = 0
    pool.guarded = False


finishers_forked()
