"""The failure of a world: as text, and until hosts agree on its cause.

The text is the class of engine_ext/errors.py that every call raises, a colon, and the message.

On several hosts ranks may fail at the same moment. So the coordinator's host judges what hosts claim, and the first claim that
it gets is the failure cause. A host that gets no answer for some seconds accepts its own claim.
"""
from libc.stdint cimport uint64_t
from libc.stdio cimport snprintf

from engine_ext.coordinator.reports cimport STEPS_HINT
from engine_ext.hosts.network cimport network_relay
from engine_ext.platform.atomics cimport load32_acquire, load_acquire, now_ns
from engine_ext.platform.clock cimport after_ns, overdue_ns
from engine_ext.platform.posix cimport nanosleep, timespec
from engine_ext.shared.layout cimport CAUSE_DIED, CAUSE_LEFT, CAUSE_LOST, CAUSE_RAISED
from engine_ext.shared.segment cimport claimed, settle_claim

cdef enum:
    CLAIM_NS = 3000000000     # time for the coordinator's host to answer a claim, on a machine with other work
    LOOK_NS = 200000            # nanoseconds between two looks of a rank that is about to leave


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
        kind, did, hint = b"RankLeftError", b"left while others still need it", STEPS_HINT
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
