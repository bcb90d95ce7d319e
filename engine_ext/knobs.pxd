from engine_ext.control.state cimport State
from engine_ext.shared.layout cimport engine_knobs

cdef tuple STORES
cdef tuple COMPRESSIONS
cdef engine_knobs knobs_with(engine_knobs knobs, dict changes) except *
cdef dict knobs_of(State* e)
