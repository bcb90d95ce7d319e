"""When a batch closes, and what goes into it."""
from engine_ext.control.coordinator cimport Coordinator

cdef bint close_batches(Coordinator* c) noexcept nogil
