"""Ends of operations: marks them done, wakes their waiters, and describes why a world has failed."""
from libc.stdint cimport uint64_t

from engine_ext.control.state cimport State
from engine_ext.operations.op cimport Op

cdef void raise_event(State* e, int event) noexcept nogil
cdef void complete_op(State* e, Op* op) noexcept nogil
cdef void end_step(State* e, int number) noexcept nogil
cdef void wake_waiters(State* e) noexcept nogil
cdef void wake_any_waiter(State* e) noexcept nogil

cdef enum:
    FAILURE_TEXT_BYTES = 2048        # bytes of the longest failure text: a reason and the words around it

cdef void describe_failure(State* e, char* text) noexcept nogil
cdef void claim_await(State* e) noexcept nogil
cdef uint64_t claim_deadline(State* e) noexcept nogil
cdef void claim_outwait(State* e) noexcept nogil
