"""What has become of a world, in words; and the wait for it, where another host decides."""
from libc.stdint cimport uint64_t

from engine_ext.control.state cimport State

cdef enum:
    VERDICT_BYTES = 2048        # of the longest text: a reason, and what stands around it

cdef void verdict_describe(State* e, char* text) noexcept nogil
cdef void verdict_await(State* e) noexcept nogil
cdef uint64_t verdict_deadline(State* e) noexcept nogil
cdef void verdict_outwait(State* e) noexcept nogil
