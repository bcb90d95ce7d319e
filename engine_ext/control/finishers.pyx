"""Finishers: the threads on which native calls end (engine_ext/bindings/calls.h).

What a call's end sets off belongs to the framework: it may run the rest of a program, and wait there for other collectives. So
whoever drives only puts the finished operation on a queue, and a finisher takes it from there. When all finishers are busy
another one is started, since each may be waiting for what the next brings; those that have had nothing to do for IDLE_SECONDS
end, but for one. Finishers hold neither a lock nor the driver's role nor the GIL while they call, and have all signals blocked.

The queue belongs to the process: a callback may outlive the engine whose call it ends.
"""
from engine_ext.operations.op cimport Op
from engine_ext.platform.posix cimport (
    CLOCK_MONOTONIC, SIG_SETMASK, clock_gettime, pthread_attr_destroy, pthread_attr_init, pthread_attr_setdetachstate,
    pthread_attr_t, pthread_cond_init, pthread_cond_signal, pthread_cond_t, pthread_cond_timedwait, pthread_condattr_init,
    pthread_condattr_setclock, pthread_condattr_t, pthread_create, pthread_mutex_init, pthread_mutex_lock, pthread_mutex_t,
    pthread_mutex_unlock, pthread_sigmask, pthread_t, PTHREAD_CREATE_DETACHED, sigfillset, sigset_t, timespec,
)

cdef enum:
    IDLE_SECONDS = 5

cdef struct Finishers:
    pthread_mutex_t lock
    pthread_cond_t news         # there is something on the queue
    Op* first                   # the queue, by `next`: operations that are done, oldest first
    Op* last
    int threads                 # that there are
    int idle                    # of these, how many wait for news
    int queued                  # operations on the queue

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
            waited = False
            pthread_mutex_unlock(&pool.lock)
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


cdef bint start() noexcept nogil:
    """Start one more finisher; whether that was possible. The caller holds the lock."""
    cdef pthread_attr_t attributes
    cdef sigset_t everything, theirs
    cdef pthread_t thread
    cdef bint started
    if pthread_attr_init(&attributes):
        return False
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED)
    sigfillset(&everything)
    pthread_sigmask(SIG_SETMASK, &everything, &theirs)
    started = pthread_create(&thread, &attributes, finisher, NULL) == 0
    pthread_sigmask(SIG_SETMASK, &theirs, NULL)
    pthread_attr_destroy(&attributes)
    pool.threads += started
    return started


cdef bint finishers_start() noexcept nogil:
    """See to it that there is a finisher: whether there is one. Called before every submission that may need it."""
    cdef bint there
    pthread_mutex_lock(&pool.lock)
    there = pool.threads > 0 or start()
    pthread_mutex_unlock(&pool.lock)
    return there


cdef void finishers_add(Op* op) noexcept nogil:
    """Have an operation ended, which is done. There is a finisher; without memory for another, the next that is free takes it."""
    pthread_mutex_lock(&pool.lock)
    op.next = NULL
    if pool.first != NULL:
        pool.last.next = op
    else:
        pool.first = op
    pool.last = op
    pool.queued += 1
    if pool.queued > pool.idle:
        start()
    pthread_cond_signal(&pool.news)
    pthread_mutex_unlock(&pool.lock)


cdef void finishers_forked() noexcept nogil:
    """A forked child has none of the threads, and what they were about to end is the parent's. Also the first beginning."""
    cdef pthread_condattr_t attributes
    pthread_mutex_init(&pool.lock, NULL)
    pthread_condattr_init(&attributes)
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC)
    pthread_cond_init(&pool.news, &attributes)
    pool.first = pool.last = NULL
    pool.threads = pool.idle = pool.queued = 0


finishers_forked()
