"""Overlap of communication with the program: the time in entries, the time callers are blocked, and the time of both."""
from libc.stdint cimport uint32_t, uint64_t

from engine_ext.platform.clock cimport age_ns

cdef struct Overlap:            # times in nanoseconds, monotonic; written under the engine's lock
    uint64_t blocked_ns         # time in which at least one caller was blocked, without the blocked period in progress
    uint64_t busy_ns            # time in which an entry was executed
    uint64_t exposed_ns         # time in which both held
    uint32_t blocked            # number of callers that are blocked now
    uint64_t blocked_since      # start of the blocked period in progress; valid while `blocked` is not 0
    bint in_entry               # whether an entry is in progress whose start was noted
    uint64_t entry_begun        # start of that entry
    uint64_t entry_blocked      # overlap_blocked() at that start

cdef inline uint64_t overlap_blocked(const Overlap* o, uint64_t now) noexcept nogil:
    """Nanoseconds in which at least one caller has been blocked, up to `now`."""
    return o.blocked_ns + (age_ns(now, o.blocked_since) if o.blocked else 0)

cdef inline void overlap_wait_begins(Overlap* o, uint64_t now) noexcept nogil:
    """Note that a caller is blocked from `now` on."""
    if o.blocked == 0:
        o.blocked_since = now
    o.blocked += 1

cdef inline uint64_t overlap_wait_ends(Overlap* o, uint64_t now) noexcept nogil:
    """Note the end of a wait. The last of overlapping waits returns the nanoseconds that they cover together, others 0."""
    cdef uint64_t lasted = 0
    o.blocked -= 1
    if o.blocked == 0:
        lasted = age_ns(now, o.blocked_since)
        o.blocked_ns += lasted
    return lasted

cdef inline void overlap_entry_begins(Overlap* o, uint64_t now) noexcept nogil:
    """Note the start of an entry."""
    o.in_entry, o.entry_begun, o.entry_blocked = True, now, overlap_blocked(o, now)

cdef inline uint64_t overlap_entry_ends(Overlap* o, uint64_t now) noexcept nogil:
    """Note the end of an entry. Return its exposed nanoseconds, or 0 if its start was not noted."""
    cdef uint64_t exposed, blocked
    if not o.in_entry:
        return 0
    blocked = overlap_blocked(o, now)       # a wait that was noted late may have ended before the entry began
    exposed = min(age_ns(now, o.entry_begun), blocked - min(blocked, o.entry_blocked))
    o.in_entry = False
    o.busy_ns += age_ns(now, o.entry_begun)
    o.exposed_ns += exposed
    return exposed
