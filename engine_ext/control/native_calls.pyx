"""Native calls (engine_ext/bindings/calls.h): the finisher threads on which they end, and the backlog of those that wait for
room."""
from libc.stdint cimport uint64_t

from engine_ext.control.observers cimport observe_submission
from engine_ext.control.table cimport table_release, table_submit
from engine_ext.operations.op cimport Op, fails
from engine_ext.platform.atomics cimport load32_relaxed, now_ns, store32_relaxed, store_pointer
from engine_ext.platform.clock cimport overdue_ns, patience_at
from engine_ext.platform.posix cimport (
    CLOCK_MONOTONIC, clock_gettime, engine_thread_start, nanosleep, pthread_cond_init, pthread_cond_signal, pthread_cond_t,
    pthread_cond_timedwait, pthread_cond_wait, pthread_condattr_init, pthread_condattr_setclock, pthread_condattr_t,
    pthread_mutex_init, pthread_mutex_lock, pthread_mutex_t, pthread_mutex_unlock, timespec,
)
from engine_ext.shared.layout cimport Status

cdef extern from "platform/cpu.h" nogil:
    uint64_t engine_float_enter()

cdef enum:
    IDLE_SECONDS = 5    # after so long without work a finisher ends, unless it is the last
    PATIENCE_NS = 1000000    # after so long without a finisher that comes back, another is started

cdef struct Finishers:
    pthread_mutex_t lock
    pthread_cond_t news         # the queue is not empty
    pthread_cond_t crowded      # the queue has more operations than there are idle finishers
    Op* first                   # oldest of the queue, linked by `next`: operations that are done
    Op* last                    # newest of the queue; valid while `first` is not NULL
    int threads                 # number of finishers
    int idle                    # number of finishers that wait for work
    int queued                  # number of operations on the queue
    uint64_t taken              # number of operations ever taken from the queue
    bint guarded                # whether the thread of watch_finishers exists

cdef Finishers pool


cdef void* run_finisher(void* unused) noexcept nogil:
    """Run a finisher: end operations until it has been idle for IDLE_SECONDS; the last one stays."""
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
            engine_float_enter()        # the starting thread, or the last call, may have left another floating-point state
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


cdef void* watch_finishers(void* unused) noexcept nogil:
    """Start another finisher whenever an operation waits for one and none has come back for PATIENCE_NS."""
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
            pool.threads += engine_thread_start(NULL, run_finisher, NULL) == 0
    return NULL


cdef bint finishers_start() noexcept nogil:
    """Start a finisher and the watching thread unless they exist. Return whether both do. Called before a submission that needs
    them."""
    cdef bint there
    pthread_mutex_lock(&pool.lock)
    if pool.threads == 0:
        pool.threads += engine_thread_start(NULL, run_finisher, NULL) == 0
    if not pool.guarded:
        pool.guarded = engine_thread_start(NULL, watch_finishers, NULL) == 0
    there = pool.threads > 0 and pool.guarded
    pthread_mutex_unlock(&pool.lock)
    return there


cdef void finishers_add(Op* op) noexcept nogil:
    """Queue an operation that is done, to be ended by a finisher. One exists; if no other can be started, it takes the operation
    later."""
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
    """Empty the pool. Called at import, and in a forked child, which has none of the threads; the queued operations are the
    parent's."""
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


# ---- backlog ----------------------------------------------------------------------------------------------------------------

# The backlog: operations of native calls that could not be submitted yet, because their callers cannot wait.
#
# An operation comes here when the request ring is full; when a failed call of its name is not settled yet; or when it has no name
# and its generated name is still in flight. So does the failure of a call that was refused because its name is in flight. The
# driver submits it as soon as that is over, oldest first. The engine's lock is held, except where a function says otherwise.

cdef void backlog_add(State* e, Record* record, Op* op) noexcept nogil:
    """Append an operation to the backlog, and pin its name."""
    op.record, op.next, op.previous = record, NULL, e.backlog_last
    op.submitted = now_ns()
    op.since = patience_at(e.clock, op.submitted)
    record.pins += 1
    record.queued += 1
    record.failing += fails(op)
    if record.inflight == NULL:         # it waits for room alone
        store32_relaxed(&e.table.released, e.table.released + 1)
    if e.backlog_last != NULL:
        e.backlog_last.next = op
    e.backlog_last = op
    if op.previous == NULL:
        store_pointer(<void**>&e.backlog, op)


cdef void unlink_op(State* e, Record* record, bint failing, Op* before, Op* after) noexcept nogil:
    """Remove the operation between `before` and `after` from the backlog, and unpin its name."""
    if after != NULL:
        after.previous = before
    else:
        e.backlog_last = before
    if before != NULL:
        before.next = after
    else:
        store_pointer(<void**>&e.backlog, after)
    record.queued -= 1
    record.failing -= failing
    record.pins -= 1
    table_release(&e.table, record)


cdef bint backlog_submit(State* e) noexcept nogil:
    """Submit the operations for which there is room. Return whether there was any. Called by the driver, without the lock."""
    cdef bint moved = False
    cdef Record* record
    cdef Op* op
    cdef Op* before
    cdef Op* after
    if load32_relaxed(&e.table.released) == 0:
        return False
    pthread_mutex_lock(&e.lock)
    op = e.backlog
    if op == NULL:
        store32_relaxed(&e.table.released, 0)
    while op != NULL and e.table.released:      # not always to the end: thousands may wait for a few names
        record, before, after = op.record, op.previous, op.next
        if record.inflight == NULL:
            if table_submit(&e.table, record, op, 0) != Status.OK:
                break                           # the ring is full
            observe_submission(e, op)
            unlink_op(e, record, fails(op), before, after)
            store32_relaxed(&e.table.released, e.table.released - 1)
            moved = True
        op = after
        if op == NULL:
            store32_relaxed(&e.table.released, 0)
    pthread_mutex_unlock(&e.lock)
    return moved


cdef void drop_op(State* e, Op* op, int status) noexcept nogil:
    """Remove an operation that will not be submitted, and give it `status`."""
    unlink_op(e, op.record, fails(op), op.previous, op.next)
    op.record, op.status = NULL, status


cdef Op* backlog_take_overdue(State* e, uint64_t seen) noexcept nogil:
    """Remove and return an operation that has waited longer than the stall limit for a failed call of its name to be settled;
    NULL: none has. An operation that lacks room for its request is not overdue by itself: those before it are."""
    cdef Op* op = e.backlog
    while op != NULL:
        if op.record.inflight != NULL and fails(op.record.inflight) and overdue_ns(seen, op.since, e.stall_limit_ns):
            drop_op(e, op, Status.AFTER_FAILURE)
            return op
        op = op.next
    return NULL


cdef Op* backlog_take(State* e) noexcept nogil:
    """Remove and return the oldest operation, because the world has failed; NULL: the backlog is empty."""
    cdef Op* op = e.backlog
    if op != NULL:
        drop_op(e, op, Status.FAILED_WORLD)
    return op
