"""When a batch closes, and what goes into it."""
from libc.stdint cimport int32_t, uint32_t, uint64_t, uint8_t

from engine_ext.coordinator.coordinator cimport Coordinator, StoreChooser
from engine_ext.shared.layout cimport engine_meta

cdef enum:
    MOST_LEFT_OUT = 1 << 18     # operations without a name that a rank may be behind another one

# Why the world ends if it is further behind.
cdef const char* TOO_MANY_UNNAMED

cdef bint close_batches(Coordinator* c) noexcept nogil
cdef bint append(Coordinator* c, const int32_t* ids, int32_t items, uint64_t nbytes, uint32_t flags) noexcept nogil
cdef bint are_compatible(Coordinator* c, const engine_meta* x, const engine_meta* y) noexcept nogil

cdef uint8_t stores_choose(StoreChooser* chooser, uint64_t nbytes) noexcept nogil
cdef void stores_measured(StoreChooser* chooser, uint64_t nbytes, uint8_t stores, uint64_t ns) noexcept nogil
