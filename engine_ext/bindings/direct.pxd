"""A blocking allreduce in place, without a handle."""
from engine_ext.control.state cimport State

cdef bint reduce_directly(object engine, State* e, object tensor, object name, int op, object prescale,
                          object postscale) except -1
