"""How a thread waits: in ticks, between which Python sees its signals and this rank looks for who keeps it waiting."""
from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memset

from engine_ext.bindings.failed_calls cimport release_stuck
from engine_ext.bindings.refusals cimport expect_open, refuse
from engine_ext.bindings.submit cimport TICK_NS, between_ticks
from engine_ext.control.driver cimport (
    Goal, driver_await, driver_count_unnamed, driver_join, driver_note_thread, driver_wait, driver_wait_for_all,
)
from engine_ext.control.stall cimport stall_join
from engine_ext.control.state cimport State
from engine_ext.operations.op cimport OP_DONE, Op
from engine_ext.platform.atomics cimport add32, load32_acquire, load32_relaxed, now_ns, store_release
from engine_ext.platform.clock cimport patience_at
from engine_ext.shared.layout cimport KINDS, STUCK_SHIFT, Status


cdef int wait_for(State* e, Op* op, bint urgent) except -1:
    """Wait until the engine has let go of `op`, whatever came of it. `urgent`: its batch closes as soon as it can."""
    cdef Goal goal
    cdef int status
    if load32_acquire(&op.flags) & OP_DONE:
        return 0
    expect_open(e)
    memset(&goal, 0, sizeof(Goal))
    goal.op = op
    with nogil:
        if urgent:
            driver_await(e, op)
        status = driver_wait(e, &goal, TICK_NS)
    if status != Status.TICK:
        return 0
    count_blocked(e, 1)
    driver_note_thread(e)
    if op.number and not load32_relaxed(&e.many_threads):
        # After the numbers of what this rank has submitted: pairs with the acquire in release_stuck, which then reads those.
        store_release(&e.segment.mine.stuck, <uint64_t>(op.meta.kind + 1) << STUCK_SHIFT | (op.number - 1))
    try:
        while status == Status.TICK:
            between_ticks(e, op)
            release_stuck(e, op)
            with nogil:
                status = driver_wait(e, &goal, TICK_NS)
    finally:
        store_release(&e.segment.mine.stuck, 0)
        count_blocked(e, -1)
    return 0


cdef void count_blocked(State* e, int one) noexcept:
    """Say that a thread of this rank has begun to wait for long, or has ceased to."""
    add32(&e.segment.mine.blocked, <uint32_t>one)
    add32(&e.segment.world.mine.blocked_anywhere, <uint32_t>one)


cdef int wait_for_joins(State* e) except -1:
    """Bring nothing until every rank has joined."""
    cdef Goal goal
    cdef uint64_t begun
    cdef int status, kind
    memset(&goal, 0, sizeof(Goal))
    goal.idle = True
    driver_wait_for_all(e, True)
    try:
        while True:                     # what is in flight first
            with nogil:
                status = driver_wait(e, &goal, TICK_NS)
            if status == Status.OK:
                status = driver_join(e, &goal.joins)
            if status == Status.OK:
                break
            if status != Status.TICK:
                refuse(e, status, "join")
            between_ticks(e, NULL)
    finally:
        driver_wait_for_all(e, False)
    goal.idle, begun, e.joins_reported = False, patience_at(e.clock, now_ns()), False
    with nogil:
        status = driver_wait(e, &goal, TICK_NS)
    while status == Status.TICK:
        PyErr_CheckSignals()
        with nogil:
            stall_join(e, begun)
            status = driver_wait(e, &goal, TICK_NS)
    if load32_acquire(&e.segment.joins) < goal.joins:
        refuse(e, Status.FAILED_WORLD, "join")
    # The ranks have submitted different numbers of unnamed operations: count anew, together.
    for kind in range(KINDS):
        driver_count_unnamed(e, kind, 0)
    return 0
