"""The thread that takes in what comes from other hosts."""
from libc.stdint cimport uint64_t

from engine_ext.control.state cimport State

cdef int network_start(State* e) noexcept nogil
cdef void network_relay(State* e) noexcept nogil
cdef void network_rest(State* e) noexcept nogil
cdef uint64_t network_held(const State* e) noexcept nogil
cdef bint network_unseen(State* e) noexcept nogil
cdef void network_tell_end(State* e) noexcept nogil
cdef void network_leave(State* e, uint64_t ns) noexcept nogil
