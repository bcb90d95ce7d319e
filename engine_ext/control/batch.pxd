"""When a batch closes, and what goes into it."""
from libc.stdint cimport int64_t

from engine_ext.control.coordinator cimport Coordinator
from engine_ext.control.layout cimport engine_meta

cdef bint close_batches(Coordinator* c) noexcept nogil
cdef int64_t meta_bytes(const engine_meta* meta) noexcept nogil
