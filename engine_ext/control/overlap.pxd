"""Overlap of communication with the program: the time in entries, in blocked callers, and in both."""
from libc.stdint cimport uint32_t, uint64_t

from engine_ext.platform.clock cimport age_ns

cdef struct Overlap:            # times in nanoseconds, monotonic; under the engine's lock
    uint64_t blocked_ns         # time in which some caller was blocked, up to the last moment without one
    uint64_t busy_ns            # time in which an entry was executed
    uint64_t exposed_ns         # time in which both held
    uint32_t blocked            # callers that are blocked now
    uint64_t blocked_since      # when the first of them was; valid while `blocked`
    bint in_entry               # whether an entry is in progress whose beginning was noted
    uint64_t entry_begun        # when it began
    uint64_t entry_blocked      # overlap_blocked() then

cdef inline uint64_t overlap_blocked(const Overlap* o, uint64_t now) noexcept nogil:
    """For how long some caller has been blocked, up to now."""
    return o.blocked_ns + (age_ns(now, o.blocked_since) if o.blocked else 0)

cdef inline void overlap_wait_begins(Overlap* o, uint64_t now) noexcept nogil:
    if o.blocked == 0:
        o.blocked_since = now
    o.blocked += 1

cdef inline uint64_t overlap_wait_ends(Overlap* o, uint64_t now) noexcept nogil:
    """When the last of several overlapping waits ends: the time that they cover together. Otherwise 0."""
    cdef uint64_t lasted = 0
    o.blocked -= 1
    if o.blocked == 0:
        lasted = age_ns(now, o.blocked_since)
        o.blocked_ns += lasted
    return lasted

cdef inline void overlap_entry_begins(Overlap* o, uint64_t now) noexcept nogil:
    o.in_entry, o.entry_begun, o.entry_blocked = True, now, overlap_blocked(o, now)

cdef inline uint64_t overlap_entry_ends(Overlap* o, uint64_t now) noexcept nogil:
    """The exposed time of the entry that ends; 0 if its beginning was not noted."""
    cdef uint64_t exposed, blocked
    if not o.in_entry:
        return 0
    blocked = overlap_blocked(o, now)       # a wait that is noted late may have ended before the entry began
    exposed = min(age_ns(now, o.entry_begun), blocked - min(blocked, o.entry_blocked))
    o.in_entry = False
    o.busy_ns += age_ns(now, o.entry_begun)
    o.exposed_ns += exposed
    return exposed
