"""What has become of a world, in words: the class of engine_ext/errors.py that every call raises, a colon, and the message."""
from libc.stdint cimport uint64_t
from libc.stdio cimport snprintf

from engine_ext.platform.atomics cimport load_acquire
from engine_ext.shared.layout cimport CAUSE_DIED, CAUSE_LEFT, CAUSE_RAISED

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
    else:
        kind, did = b"RankStalledError", b"stalled"
    at = snprintf(text, VERDICT_BYTES, "%s: rank %d %s: %s%s", kind, culprit, did,
                  <const char*>e.segment.world.pages[reporter].reason, hint)
    if reporter != culprit and at < VERDICT_BYTES:
        snprintf(text + at, VERDICT_BYTES - at, " (rank %d noticed it first)", reporter)
