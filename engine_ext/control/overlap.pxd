"""How much of the time in which entries are executed some caller is blocked, and how much of it computing hides."""
from libc.stdint cimport uint32_t, uint64_t

from engine_ext.platform.clock cimport age_ns

cdef struct Overlap:            # nanoseconds, as all times here; under the engine's lock
    uint64_t blocked_ns         # some caller was blocked
    uint64_t busy_ns            # an entry was executed
    uint64_t exposed_ns         # both
    uint32_t blocked            # callers in a wait now
    uint64_t blocked_since
    bint in_entry
    uint64_t entry_begun
    uint64_t entry_blocked      # blocked_ns then

cdef inline uint64_t overlap_blocked(const Overlap* o, uint64_t now) noexcept nogil:
    """For how long some caller has been blocked, up to now."""
    return o.blocked_ns + (age_ns(now, o.blocked_since) if o.blocked else 0)

cdef inline void overlap_wait_begins(Overlap* o, uint64_t now) noexcept nogil:
    if o.blocked == 0:
        o.blocked_since = now
    o.blocked += 1

cdef inline uint64_t overlap_wait_ends(Overlap* o, uint64_t now) noexcept nogil:
    """How long nobody but this caller and its overlapping ones have been blocked, if this was the last of them; else 0."""
    cdef uint64_t lasted = 0
    o.blocked -= 1
    if o.blocked == 0:
        lasted = age_ns(now, o.blocked_since)
        o.blocked_ns += lasted
    return lasted

cdef inline void overlap_entry_begins(Overlap* o, uint64_t now) noexcept nogil:
    o.in_entry, o.entry_begun, o.entry_blocked = True, now, overlap_blocked(o, now)

cdef inline uint64_t overlap_entry_ends(Overlap* o, uint64_t now) noexcept nogil:
    """What of the entry was exposed; 0 if its beginning was not seen."""
    cdef uint64_t exposed, blocked
    if not o.in_entry:
        return 0
    blocked = overlap_blocked(o, now)       # a wait that is told late may have ended before the entry began
    exposed = min(age_ns(now, o.entry_begun), blocked - min(blocked, o.entry_blocked))
    o.in_entry = False
    o.busy_ns += age_ns(now, o.entry_begun)
    o.exposed_ns += exposed
    return exposed
