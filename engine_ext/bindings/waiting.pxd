"""How a thread waits: for an operation, and for ranks that have yet to join."""
from engine_ext.control.state cimport State
from engine_ext.operations.op cimport Op

cdef int wait_for(State* e, Op* op, bint urgent) except -1
cdef int wait_for_joins(State* e) except -1
