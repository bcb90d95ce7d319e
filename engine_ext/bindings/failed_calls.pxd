"""Failed calls that a rank announces."""
from libc.stdint cimport int64_t

from engine_ext.control.state cimport State
from engine_ext.operations.op cimport Op

cdef int fail_call(State* e, str kind, object name, str reason) except -1
cdef int catch_up(State* e, const int64_t* counts) except -1
cdef int release_stuck(State* e, Op* op) except -1
cdef int release(State* e, int rank, Op* op) except -1
