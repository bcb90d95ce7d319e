"""When a batch closes, and what goes into it."""
from libc.stdint cimport int32_t, uint32_t, uint64_t

from engine_ext.control.coordinator cimport Coordinator
from engine_ext.shared.layout cimport engine_meta

cdef bint close_batches(Coordinator* c) noexcept nogil
cdef bint append(Coordinator* c, const int32_t* ids, int32_t items, uint64_t nbytes, uint32_t flags) noexcept nogil
cdef bint alike(Coordinator* c, const engine_meta* x, const engine_meta* y) noexcept nogil
