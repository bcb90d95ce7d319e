"""The engine's state as Python objects, and the knobs that Python sets."""
from libc.stdint cimport uint32_t, uint64_t

from engine_ext.control.state cimport State
from engine_ext.shared.layout cimport engine_knobs
from engine_ext.shared.segment cimport Segment

cdef object clock_of(const Segment* segment)
cdef dict counters_of(State* e)
cdef tuple steps_of(State* e, uint64_t since)
cdef list history_of(State* e)
cdef list late_steps_of(State* e)
cdef list definitions_of(State* e)
cdef list pending_of(State* e)
cdef list unfinished_of(State* e)
cdef list overdue_of(State* e)
cdef list ranks_of(State* e)

cdef engine_knobs knobs_with(engine_knobs knobs, dict changes) except *
cdef uint32_t set_knobs(State* e, dict changes) except? 0
cdef dict read_knobs_in_force(State* e)
cdef int expect_summing(const State* e, const engine_knobs* knobs) except -1
