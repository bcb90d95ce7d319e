from libc.stdint cimport uint32_t

from engine_ext.control.state cimport State
from engine_ext.shared.layout cimport engine_knobs

cdef engine_knobs knobs_with(engine_knobs knobs, dict changes) except *
cdef uint32_t set_knobs(State* e, dict changes) except? 0
cdef dict knobs_of(State* e)
cdef int expect_summing(const State* e, const engine_knobs* knobs) except -1
