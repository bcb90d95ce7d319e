"""Operations that end: their owners are told, and whoever waits."""
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport malloc

from engine_ext.control.finishers cimport finishers_add
from engine_ext.control.observers cimport observe_step
from engine_ext.control.state cimport Role
from engine_ext.control.table cimport table_dismiss
from engine_ext.control.verdict cimport VERDICT_BYTES, verdict_describe
from engine_ext.operations.op cimport OP_ABANDONED, OP_DONE, OP_STAND_IN, Finished
from engine_ext.platform.atomics cimport (
    FENCE_DONE, cas_pointer, count_up, full_fence, load32_relaxed, load_pointer, or32, store_release,
)
from engine_ext.platform.doors cimport DOOR_EVERYBODY, door_ring
from engine_ext.platform.posix cimport pthread_mutex_lock, pthread_mutex_unlock, write
from engine_ext.shared.layout cimport SLEEP_WAITER, Status


cdef void raise_event(State* e, int event) noexcept nogil:
    """Give the monitor thread, of which there is one for a world and its process sets, something to do."""
    cdef uint64_t one = 1
    or32(&e.world.events, <unsigned int>event)
    write(e.world.events_fd, &one, 8)


cdef void complete(State* e, Op* op) noexcept nogil:
    """Let go of an operation. Nothing may touch it afterwards: its owner frees it."""
    cdef Finished finished = op.finished
    cdef void* head
    if load32_relaxed(&op.flags) & OP_STAND_IN:
        table_dismiss(op)
        return
    if finished != NULL:
        conclude_call(e, op)
    if or32(&op.flags, OP_DONE) & OP_ABANDONED:
        if finished != NULL:
            finishers_add(op)
            return
        while True:                     # nobody holds a handle: for the next call that has the GIL (I9)
            head = load_pointer(&e.deferred_free)
            op.next = <Op*>head
            if cas_pointer(&e.deferred_free, head, op):
                break


cdef void conclude_call(State* e, Op* op) noexcept nogil:
    """What is left to do for a native call while there is an engine: its end may be told when that is gone."""
    if op.status == Status.FAILED_WORLD and op.text == NULL:
        op.text = <char*>malloc(VERDICT_BYTES)
        if op.text != NULL:
            verdict_describe(e, op.text)
    if op.step and op.status == Status.OK:
        end_step(e, op.step - 1)


cdef void end_step(State* e, int number) noexcept nogil:
    """A step of optimizer `number` has ended."""
    pthread_mutex_lock(&e.lock)
    store_release(&e.segment.mine.steps, e.segment.mine.steps + 1)      # pairs with coordinator_step
    pthread_mutex_unlock(&e.lock)
    observe_step(e, number)


cdef void wake_waiters(State* e) noexcept nogil:
    """Waiters that do not drive look whether theirs is done. The caller holds the role; a waiter that does is counted too."""
    full_fence(FENCE_DONE)                            # done before the look for waiters; pairs with the fence in driver_wait
    if load32_relaxed(&e.waiters) > <uint32_t>(load32_relaxed(&e.role) == Role.WAITER):
        door_ring(&e.local_door, DOOR_EVERYBODY)
        count_up(&e.segment.wakes, 1)


cdef void wake_any_waiter(State* e) noexcept nogil:
    """The same, by a thread that never has the role: a waiter may have it, and sleep in it."""
    full_fence(FENCE_DONE)                            # done before the look for waiters; pairs with the fence in driver_wait
    if load32_relaxed(&e.waiters):
        door_ring(&e.local_door, DOOR_EVERYBODY)
        door_ring(&e.segment.mine.door[SLEEP_WAITER], 1)
