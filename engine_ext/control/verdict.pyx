"""What has become of a world, in words: the class of engine_ext/errors.py that every call raises, a colon, and the message.

On several hosts ranks may fail in the same moment, so what a host claims is judged by the coordinator's host, where the first
claim is the verdict. Who is told nothing for some seconds believes its own host.
"""
from libc.stdio cimport snprintf

from engine_ext.hosts.network cimport network_relay
from engine_ext.platform.atomics cimport load_acquire, now_ns
from engine_ext.platform.clock cimport after_ns, overdue_ns
from engine_ext.platform.posix cimport nanosleep, timespec
from engine_ext.shared.layout cimport CAUSE_DIED, CAUSE_LEFT, CAUSE_LOST, CAUSE_RAISED
from engine_ext.shared.segment cimport claimed, settle_claim

cdef enum:
    VERDICT_NS = 3000000000     # how long the coordinator's host may take to answer a claim, on a machine with other work
    LOOK_NS = 200000            # between two looks of a rank that is about to leave

cdef const char* LEFT_HINT = (b". Did ranks make different numbers of steps? Give each as many batches, or let each call "
                              b"engine.join() after its last step")


cdef void verdict_describe(State* e, char* text) noexcept nogil:
    """Write the text, of at most VERDICT_BYTES: the first cause of the failure, or that the engine was shut down."""
    cdef uint64_t word = load_acquire(e.segment.abort)      # pairs with abort_world
    cdef int culprit = <int>(word & 0xFFFF) - 1, cause = <int>(word >> 16 & 0xFFFF), reporter = <int>(word >> 32), at
    cdef const char* kind
    cdef const char* did
    cdef const char* hint = b""
    if word == 0:
        snprintf(text, VERDICT_BYTES, "NotInitializedError: %s while the operation was in flight",
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
    at = snprintf(text, VERDICT_BYTES, "%s: rank %d %s: %s%s", kind, culprit, did,
                  <const char*>e.segment.world.pages[reporter].reason, hint)
    if reporter != culprit and at < VERDICT_BYTES:
        snprintf(text + at, VERDICT_BYTES - at, " (rank %d noticed it first)", reporter)


cdef void verdict_await(State* e) noexcept nogil:
    """A failure is claimed on this host: have it judged. The caller holds the role."""
    cdef uint64_t now = now_ns()
    network_relay(e.network)
    if e.claimed_at == 0:
        e.claimed_at = now
    elif overdue_ns(now, e.claimed_at, VERDICT_NS):
        settle_claim(&e.segment)


cdef uint64_t verdict_deadline(State* e) noexcept nogil:
    """When whoever drives has to look again at a claim, by the monotonic clock."""
    return after_ns(e.claimed_at, VERDICT_NS)


cdef void verdict_outwait(State* e) noexcept nogil:
    """Wait until what this host claims is judged: a rank that leaves before would be taken for the cause."""
    cdef uint64_t begun = now_ns()
    cdef timespec pause
    pause.tv_sec, pause.tv_nsec = 0, LOOK_NS
    while claimed(&e.segment) and not overdue_ns(now_ns(), begun, VERDICT_NS):
        nanosleep(&pause, NULL)
    settle_claim(&e.segment)
