"""Ends of operations: marks them done, wakes their waiters, and describes why a world has failed."""
from libc.stdint cimport uint32_t
from libc.stdio cimport snprintf
from libc.stdlib cimport malloc

from engine_ext.control.native_calls cimport finishers_add
from engine_ext.control.observers cimport observe_step
from engine_ext.control.state cimport Role
from engine_ext.control.table cimport table_dismiss
from engine_ext.hosts.network cimport network_relay
from engine_ext.operations.op cimport OP_ABANDONED, OP_DONE, OP_STAND_IN, Finished
from engine_ext.platform.atomics cimport (
    FENCE_DONE, cas_pointer, count_up, full_fence, load32_acquire, load32_relaxed, load_acquire, load_pointer, now_ns,
    or32, store_release,
)
from engine_ext.platform.clock cimport after_ns, overdue_ns
from engine_ext.platform.doors cimport DOOR_EVERYBODY, door_ring
from engine_ext.platform.posix cimport nanosleep, pthread_mutex_lock, pthread_mutex_unlock, timespec, write
from engine_ext.shared.layout cimport CAUSE_DIED, CAUSE_LEFT, CAUSE_LOST, CAUSE_RAISED, SLEEP_WAITER, Status
from engine_ext.shared.segment cimport claimed, settle_claim


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


# ---- why a world has ended --------------------------------------------------------------------------------------------------

# The failure of a world as text: the class of engine_ext/errors.py that every call raises, a colon, and the message.
#
# On several hosts ranks may fail at the same moment. So the coordinator's host judges what hosts claim, and the first claim that
# it gets is the failure cause. A host that gets no answer for some seconds accepts its own claim.

cdef enum:
    CLAIM_NS = 3000000000     # time for the coordinator's host to answer a claim, on a machine with other work
    LOOK_NS = 200000            # nanoseconds between two looks of a rank that is about to leave

cdef const char* LEFT_HINT = (b". Did ranks make different numbers of steps? Give each as many batches, or let each call "
                              b"engine.join() after its last step")


cdef void describe_failure(State* e, char* text) noexcept nogil:
    """Write the failure as text, of at most FAILURE_TEXT_BYTES: its first cause, or that the engine was shut down."""
    cdef uint64_t word = load_acquire(e.segment.abort)      # pairs with abort_world
    cdef int culprit = <int>(word & 0xFFFF) - 1, cause = <int>(word >> 16 & 0xFFFF), reporter = <int>(word >> 32), at
    cdef const char* kind
    cdef const char* did
    cdef const char* hint = b""
    if word == 0 and load32_acquire(&e.parted):
        snprintf(text, FAILURE_TEXT_BYTES, "CollectiveError: rank %d has left their process set",
                 e.segment.numbers[load32_acquire(&e.parted) - 1])
        return
    if word == 0:
        snprintf(text, FAILURE_TEXT_BYTES, "NotInitializedError: %s while the operation was in flight",
                 b"the engine was shut down" if e.world == e or e.world.closed else b"the process set was removed")
        return
    if cause == CAUSE_DIED:
        kind, did = b"RankDiedError", b"died"
    elif cause == CAUSE_RAISED:
        kind, did = b"RankRaisedError", b"failed"
    elif cause == CAUSE_LEFT:
        kind, did, hint = b"RankLeftError", b"left while others still need it", LEFT_HINT
    elif cause == CAUSE_LOST:
        kind, did = b"RankLostError", b"cannot be reached"
    else:
        kind, did = b"RankStalledError", b"stalled"
    at = snprintf(text, FAILURE_TEXT_BYTES, "%s: rank %d %s: %s%s", kind, culprit, did,
                  <const char*>e.segment.world.pages[reporter].reason, hint)
    if reporter != culprit and at < FAILURE_TEXT_BYTES:
        snprintf(text + at, FAILURE_TEXT_BYTES - at, " (rank %d noticed it first)", reporter)


cdef void claim_await(State* e) noexcept nogil:
    """Have a failure that is claimed on this host judged. The caller holds the role, and calls again until it is."""
    cdef uint64_t now = now_ns()
    network_relay(e.network)
    if e.claimed_at == 0:
        e.claimed_at = now
    elif overdue_ns(now, e.claimed_at, CLAIM_NS):
        settle_claim(&e.segment)


cdef uint64_t claim_deadline(State* e) noexcept nogil:
    """Return when the driver has to look at the claim again: nanoseconds, monotonic."""
    return after_ns(e.claimed_at, CLAIM_NS)


cdef void claim_outwait(State* e) noexcept nogil:
    """Wait until this host's claim is judged: a rank that leaves earlier would be taken for the cause."""
    cdef uint64_t begun = now_ns()
    cdef timespec pause
    pause.tv_sec, pause.tv_nsec = 0, LOOK_NS
    while claimed(&e.segment) and not overdue_ns(now_ns(), begun, CLAIM_NS):
        nanosleep(&pause, NULL)
    settle_claim(&e.segment)
