"""Handle: one submitted operation, as Python holds it, and waiting for it; and calls that wait without a handle."""
from libc.stdint cimport uint64_t

from engine_ext.control.state cimport State
from engine_ext.operations.op cimport CurrentStream, Op

cdef class Handle:
    cdef Op* op                     # NULL once its result was taken and it was released
    cdef State* state
    cdef object engine              # owns `state`
    cdef readonly str name
    cdef readonly object output
    cdef object memory              # gathered bytes: Memory, or a tensor of the framework's; or None
    cdef tuple rows                 # rows gathered from each rank; None: none were gathered
    cdef list parts                 # result of an allgather of a group, as of `group_parts`; None: not taken
    cdef int waiting                # threads in wait()
    cdef object told                # function to call when it is done; None: none, or it was called
    cdef uint64_t ticket            # ticket of a GPU operation that has succeeded; 0: there is none
    cdef CurrentStream stream_of    # returns the stream that has to wait for `ticket`

    cdef int wait_until(self, uint64_t limit_ns) except -1
    cdef int take_result(self, Op* op) except -1
    cdef int take_allocated_result(self, Op* op) except -1

cdef Handle begin_op(object engine, State* e, Op* op, object name, bint blocking, object output)
cdef Handle begin_in_turn(object engine, State* e, Op* op, str name)

cdef int wait_for(State* e, Op* op, bint urgent, uint64_t limit_ns) except -1
cdef int wait_for_joins(State* e) except -1

cdef bint reduce_directly(object engine, State* e, object tensor, object name, int op, object prescale,
                          object postscale) except -1
cdef int meet_directly(object engine, State* e, object name) except -1
