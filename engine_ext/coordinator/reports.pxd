"""The coordinator's reports for people: who waits for whom."""
from libc.stdint cimport int32_t, uint64_t

from engine_ext.coordinator.coordinator cimport Coordinator, NameState

# The hint for people if some ranks wait for what others do not submit any more.
cdef const char* STEPS_HINT

cdef enum Standoff:
    NONE = 0        # no rank lacks a name
    ONE_SIDED = 1   # some ranks wait for others
    MUTUAL = 2      # some ranks wait for each other

cdef Standoff wait_report_describe(Coordinator* c, int culprit, char* text, int room) noexcept nogil
cdef bint wait_report_overdue(Coordinator* c, uint64_t seen, uint64_t warning_ns, char* text, int room) noexcept nogil
cdef int wait_report_absentee(Coordinator* c, int rank, int32_t id) noexcept nogil
