"""Who waits for what, and for whom, as the coordinator sees it."""
from libc.stdint cimport int32_t, uint64_t

from engine_ext.coordinator.coordinator cimport Coordinator

cdef enum Standoff:
    NONE = 0        # nobody withholds anything
    ONE_SIDED = 1
    MUTUAL = 2      # some ranks keep each other waiting

cdef Standoff wait_report_describe(Coordinator* c, int culprit, char* text, int room) noexcept nogil
cdef bint wait_report_overdue(Coordinator* c, uint64_t seen, uint64_t warning_ns, char* text, int room) noexcept nogil
cdef int wait_report_absentee(Coordinator* c, int rank, int32_t id) noexcept nogil
