"""The backlog: operations of native calls that could not be submitted yet, since their callers cannot wait.

An operation comes here when the request ring is full, when a failed call of its name is not settled yet, or when it has no name
and the one that it is given is still in flight; and the failure of a call that was refused because its name is. Whoever drives
submits it as soon as that is over, the oldest first. The engine's lock is held, except where it says otherwise.
"""
from libc.stdint cimport uint64_t

from engine_ext.control.observers cimport observe_submission
from engine_ext.control.table cimport table_release, table_submit
from engine_ext.operations.op cimport fails
from engine_ext.platform.atomics cimport load_pointer, now_ns, store_pointer
from engine_ext.platform.clock cimport overdue_ns, patience_at
from engine_ext.platform.posix cimport pthread_mutex_lock, pthread_mutex_unlock
from engine_ext.shared.layout cimport Status


cdef void backlog_add(State* e, Record* record, Op* op) noexcept nogil:
    op.record, op.next, op.previous = record, NULL, e.backlog_last
    op.submitted = now_ns()
    op.since = patience_at(e.clock, op.submitted)
    record.pins += 1
    record.queued += 1
    record.failing += fails(op)
    if e.backlog_last != NULL:
        e.backlog_last.next = op
    e.backlog_last = op
    if op.previous == NULL:
        store_pointer(<void**>&e.backlog, op)


cdef void unlink(State* e, Record* record, bint failing, Op* before, Op* after) noexcept nogil:
    """Take the operation between these two out of the list."""
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
    """Submit what there is room for: whether it was anything. Called by whoever drives, without the lock."""
    cdef bint moved = False
    cdef Record* record
    cdef Op* op
    cdef Op* before
    cdef Op* after
    if load_pointer(<void**>&e.backlog) == NULL:
        return False
    pthread_mutex_lock(&e.lock)
    op = e.backlog
    while op != NULL:
        record, before, after = op.record, op.previous, op.next
        if record.inflight == NULL:
            if table_submit(&e.table, record, op, 0) != Status.OK:
                break                           # the ring is full
            observe_submission(e, op)
            unlink(e, record, fails(op), before, after)
            moved = True
        op = after
    pthread_mutex_unlock(&e.lock)
    return moved


cdef void take(State* e, Op* op, int status) noexcept nogil:
    """Take an operation out that will not be submitted."""
    unlink(e, op.record, fails(op), op.previous, op.next)
    op.record, op.status = NULL, status


cdef Op* backlog_take_overdue(State* e, uint64_t seen) noexcept nogil:
    """Take out an operation that has waited for longer than the stall limit for a failed call of its name to be settled; NULL:
    none has. Calls without room for a request are not overdue by themselves: those before them are."""
    cdef Op* op = e.backlog
    while op != NULL:
        if op.record.inflight != NULL and fails(op.record.inflight) and overdue_ns(seen, op.since, e.stall_limit_ns):
            take(e, op, Status.AFTER_FAILURE)
            return op
        op = op.next
    return NULL


cdef Op* backlog_take(State* e) noexcept nogil:
    """Take out the oldest, for the world has failed; NULL: there is none."""
    cdef Op* op = e.backlog
    if op != NULL:
        take(e, op, Status.FAILED_WORLD)
    return op
