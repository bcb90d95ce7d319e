"""Operations that end: their owners are told, and whoever waits; and why a world has ended."""
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
    """Give the monitor thread, of which there is one for a world and its process sets, something to do."""
    cdef uint64_t one = 1
    or32(&e.world.events, <unsigned int>event)
    write(e.world.events_fd, &one, 8)


cdef void complete_op(State* e, Op* op) noexcept nogil:
    """Let go of an operation. Nothing may touch it afterwards: its owner frees it."""
    cdef Finished finished = <Finished>load_pointer(<void**>&op.finished)
    cdef void* head
    if load32_relaxed(&op.flags) & OP_STAND_IN:
        table_dismiss(op)
        return
    if finished != NULL:
        conclude_call(e, op)
    if or32(&op.flags, OP_DONE) & OP_ABANDONED:
        if load_pointer(<void**>&op.finished) != NULL:      # it may have come since: handles ask late (Handle.notify)
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
        op.text = <char*>malloc(FAILURE_TEXT_BYTES)
        if op.text != NULL:
            describe_failure(e, op.text)
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


# ---- why a world has ended --------------------------------------------------------------------------------------------------

# What has become of a world, in words: the class of engine_ext/errors.py that every call raises, a colon, and the message.
#
# On several hosts ranks may fail in the same moment, so what a host claims is judged by the coordinator's host, where the first
# claim is the verdict. A host that gets no answer for some seconds takes its own claim.

cdef enum:
    CLAIM_NS = 3000000000     # how long the coordinator's host may take to answer a claim, on a machine with other work
    LOOK_NS = 200000            # between two looks of a rank that is about to leave

cdef const char* LEFT_HINT = (b". Did ranks make different numbers of steps? Give each as many batches, or let each call "
                              b"engine.join() after its last step")


cdef void describe_failure(State* e, char* text) noexcept nogil:
    """Write the text, of at most FAILURE_TEXT_BYTES: the first cause of the failure, or that the engine was shut down."""
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
    """A failure is claimed on this host: have it judged. The caller holds the role."""
    cdef uint64_t now = now_ns()
    network_relay(e.network)
    if e.claimed_at == 0:
        e.claimed_at = now
    elif overdue_ns(now, e.claimed_at, CLAIM_NS):
        settle_claim(&e.segment)


cdef uint64_t claim_deadline(State* e) noexcept nogil:
    """When whoever drives has to look again at a claim, by the monotonic clock."""
    return after_ns(e.claimed_at, CLAIM_NS)


cdef void claim_outwait(State* e) noexcept nogil:
    """Wait until what this host claims is judged: a rank that leaves before would be taken for the cause."""
    cdef uint64_t begun = now_ns()
    cdef timespec pause
    pause.tv_sec, pause.tv_nsec = 0, LOOK_NS
    while claimed(&e.segment) and not overdue_ns(now_ns(), begun, CLAIM_NS):
        nanosleep(&pause, NULL)
    settle_claim(&e.segment)
