"""Work that a GPU was given and does not end."""
from libc.stdint cimport uint64_t

from engine_ext.control.state cimport State

cdef uint64_t device_watch(State* e, uint64_t seen) noexcept nogil
