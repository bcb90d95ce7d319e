"""A blocking allreduce in place, and a barrier, both without a handle."""
from engine_ext.control.state cimport State

cdef bint reduce_directly(object engine, State* e, object tensor, object name, int op, object prescale,
                          object postscale) except -1
cdef int meet_directly(object engine, State* e, object name) except -1
