"""Fusion: when the open batch closes, and which tensors travel in one entry."""
from libc.stdint cimport int32_t, uint32_t, uint64_t

from engine_ext.coordinator.coordinator cimport Coordinator
from engine_ext.shared.layout cimport engine_meta

cdef enum:
    MOST_LEFT_OUT = 1 << 18     # most unnamed operations by which a rank may be behind another one

# The reason with which the world ends if a rank is further behind.
cdef const char* TOO_MANY_UNNAMED

cdef bint close_batches(Coordinator* c) noexcept nogil
cdef bint append(Coordinator* c, const int32_t* ids, int32_t items, uint64_t nbytes, uint32_t flags) noexcept nogil
cdef bint are_compatible(Coordinator* c, const engine_meta* x, const engine_meta* y) noexcept nogil
