"""How an operation is submitted."""
from engine_ext.control.driver cimport Target
from engine_ext.control.state cimport State
from engine_ext.operations.op cimport Op

cdef enum:
    TICK_NS = 100000000         # how often a blocking call comes back for signals

cdef str submit(State* e, Op* op, object name, bint blocking)
cdef int make_room(State* e, const Target* target, int status) except -1
cdef int between_ticks(State* e, Op* op) except -1
