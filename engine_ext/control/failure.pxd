"""The failure of a world: its text, and the claim of its cause that the coordinator's host judges."""
from libc.stdint cimport uint64_t

from engine_ext.control.state cimport State

cdef enum:
    FAILURE_TEXT_BYTES = 2048        # bytes of the longest failure text: a reason and the words around it

cdef void describe_failure(State* e, char* text) noexcept nogil
cdef void claim_await(State* e) noexcept nogil
cdef uint64_t claim_deadline(State* e) noexcept nogil
cdef void claim_outwait(State* e) noexcept nogil
