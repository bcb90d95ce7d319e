"""Submission of operations, and announcement of failed calls."""
from libc.stdint cimport int64_t

from engine_ext.control.driver cimport Target
from engine_ext.control.state cimport State
from engine_ext.operations.op cimport Op

cdef enum:
    TICK_NS = 100000000         # nanoseconds after which a blocking call returns to handle signals

cdef str submit(State* e, Op* op, object name, bint blocking)
cdef int submit_in_turn(State* e, Op* op, str name) except -1
cdef int submit_when_room(State* e, Target* target, Op* op, bint blocking, object name) except -1
cdef int make_room(State* e, const Target* target, int status) except -1
cdef int between_ticks(State* e, Op* op) except -1

cdef int fail_call(State* e, str kind, object name, str reason) except -1
cdef int catch_up(State* e, const int64_t* counts) except -1
cdef int release_stuck(State* e, Op* op) except -1
cdef int release(State* e, int rank, Op* op) except -1
