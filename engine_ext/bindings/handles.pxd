"""Handle: one submitted operation, as Python holds it; and how a thread waits for it."""
from libc.stdint cimport uint64_t

from engine_ext.control.state cimport State
from engine_ext.operations.op cimport CurrentStream, Op

cdef class Handle:
    cdef Op* op
    cdef State* state
    cdef object engine              # it owns `state`
    cdef readonly str name
    cdef readonly object output
    cdef object memory
    cdef tuple rows
    cdef list parts                 # of an allgather of a group
    cdef int waiting                # threads in wait()
    cdef object told                # whom to call when it is done; None: nobody, or it was called
    cdef uint64_t ticket            # of an operation on a GPU that has succeeded; 0: there is none
    cdef CurrentStream stream_of

    cdef int wait_until(self, uint64_t limit_ns) except -1
    cdef int take_result(self, Op* op) except -1
    cdef int take_from_room(self, Op* op) except -1

cdef Handle begin_op(object engine, State* e, Op* op, object name, bint blocking, object output)
cdef Handle begin_in_turn(object engine, State* e, Op* op, str name)

cdef int wait_for(State* e, Op* op, bint urgent, uint64_t limit_ns) except -1
cdef int wait_for_joins(State* e) except -1
