"""The schedule: one writer, the coordinator; every rank reads all of it in order."""
from libc.stdint cimport uint32_t, uint64_t

from engine_ext.shared.layout cimport ARRIVAL_LAST_BITS, ARRIVAL_WAIT_BITS, engine_entry
from engine_ext.shared.segment cimport Segment

cdef struct Writer:
    Segment* segment
    uint64_t tail           # words appended, as published
    uint64_t sequence       # entries appended

cdef engine_entry* schedule_reserve(Writer* writer, uint32_t words) noexcept nogil
cdef void schedule_append(Writer* writer, engine_entry* entry) noexcept nogil
cdef uint64_t schedule_slowest(Writer* writer) noexcept nogil
cdef engine_entry* schedule_next(Segment* segment) noexcept nogil
cdef void schedule_advance(Segment* segment, const engine_entry* entry) noexcept nogil

# An arrival is a word: the rank that was last, plus 1 (0: not known); microseconds from when all ranks had submitted
# the tensor to when its batch was closed (saturating); microseconds from the first rank to the last (32 bits).

cdef inline int arrival_last(uint64_t arrival) noexcept nogil:
    """The rank, or -1."""
    return <int>(arrival & ((1 << ARRIVAL_LAST_BITS) - 1)) - 1

cdef inline uint64_t arrival_wait_us(uint64_t arrival) noexcept nogil:
    return arrival >> ARRIVAL_LAST_BITS & ((1 << ARRIVAL_WAIT_BITS) - 1)

cdef inline uint64_t arrival_late_us(uint64_t arrival) noexcept nogil:
    return arrival >> (ARRIVAL_LAST_BITS + ARRIVAL_WAIT_BITS)
