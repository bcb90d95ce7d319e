from engine_ext.control.layout cimport engine_knobs
from engine_ext.control.state cimport State

cdef tuple STORES
cdef tuple COMPRESSIONS
cdef engine_knobs knobs_with(engine_knobs knobs, dict changes) except *
cdef dict knobs_of(State* e)
