"""Ends of operations: marks them done, and wakes their waiters."""
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport malloc

from engine_ext.control.failure cimport FAILURE_TEXT_BYTES, describe_failure
from engine_ext.control.native_calls cimport finishers_add
from engine_ext.control.observers cimport observe_step
from engine_ext.control.state cimport Role
from engine_ext.control.table cimport table_dismiss
from engine_ext.operations.op cimport OP_ABANDONED, OP_DONE, OP_STAND_IN, Finished
from engine_ext.platform.atomics cimport (
    FENCE_DONE, cas_pointer, count_up, full_fence, load32_relaxed, load_pointer, or32, store_release,
)
from engine_ext.platform.doors cimport DOOR_EVERYBODY, door_ring
from engine_ext.platform.posix cimport pthread_mutex_lock, pthread_mutex_unlock, write
from engine_ext.shared.layout cimport SLEEP_WAITER, Status


cdef void raise_event(State* e, int event) noexcept nogil:
    """Give the monitor thread an event. There is one thread for a world and its process sets."""
    cdef uint64_t one = 1
    or32(&e.world.events, <unsigned int>event)
    write(e.world.events_fd, &one, 8)


cdef void complete_op(State* e, Op* op) noexcept nogil:
    """Mark an operation done. Its owner may free it at once, so nothing may touch it afterwards."""
    cdef Finished finished = <Finished>load_pointer(<void**>&op.finished)
    cdef void* head
    if load32_relaxed(&op.flags) & OP_STAND_IN:
        table_dismiss(op)
        return
    if finished != NULL:
        conclude_call(e, op)
    if or32(&op.flags, OP_DONE) & OP_ABANDONED:
        if load_pointer(<void**>&op.finished) != NULL:      # set late by Handle.notify, perhaps since the first look
            finishers_add(op)
            return
        while True:                     # nobody holds it: the next call with the GIL frees it (I9)
            head = load_pointer(&e.deferred_free)
            op.next = <Op*>head
            if cas_pointer(&e.deferred_free, head, op):
                break


cdef void conclude_call(State* e, Op* op) noexcept nogil:
    """Do what a native call needs an engine for, before its end is reported: the engine may be gone then."""
    if op.status == Status.FAILED_WORLD and op.text == NULL:
        op.text = <char*>malloc(FAILURE_TEXT_BYTES)
        if op.text != NULL:
            describe_failure(e, op.text)
    if op.step and op.status == Status.OK:
        end_step(e, op.step - 1)


cdef void end_step(State* e, int number) noexcept nogil:
    """Note that the optimizer `number` has ended a step."""
    pthread_mutex_lock(&e.lock)
    store_release(&e.segment.mine.steps, e.segment.mine.steps + 1)      # pairs with coordinator_step
    pthread_mutex_unlock(&e.lock)
    observe_step(e, number)


cdef void wake_waiters(State* e) noexcept nogil:
    """Have waiters without the role look whether their operation is done. The caller holds the role; if it is a waiter, it is
    counted, too."""
    full_fence(FENCE_DONE)                            # done before the look for waiters; pairs with the fence in driver_wait
    if load32_relaxed(&e.waiters) > <uint32_t>(load32_relaxed(&e.role) == Role.WAITER):
        door_ring(&e.local_door, DOOR_EVERYBODY)
        count_up(&e.segment.wakes, 1)


cdef void wake_any_waiter(State* e) noexcept nogil:
    """Have all waiters look, for a thread that never holds the role: a waiter may hold it, and sleep in it."""
    full_fence(FENCE_DONE)                            # done before the look for waiters; pairs with the fence in driver_wait
    if load32_relaxed(&e.waiters):
        door_ring(&e.local_door, DOOR_EVERYBODY)
        door_ring(&e.segment.mine.door[SLEEP_WAITER], 1)
