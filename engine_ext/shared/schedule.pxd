"""The schedule: one writer, the coordinator; every rank reads all of it in order."""
from libc.stdint cimport uint32_t, uint64_t

from engine_ext.shared.layout cimport engine_entry
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
