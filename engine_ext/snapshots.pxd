"""What an engine can tell about itself, for logs, tests and files."""
from libc.stdint cimport uint64_t

from engine_ext.control.state cimport State
from engine_ext.shared.segment cimport Segment

cdef object clock_of(const Segment* segment)
cdef dict counters_of(State* e)
cdef tuple steps_of(State* e, uint64_t since)
cdef list history_of(State* e)
cdef list definitions_of(State* e)
cdef list pending_of(State* e)
cdef list overdue_of(State* e)
cdef list ranks_of(State* e)
