"""The turns that process sets want on the GPU: noted and given by the world's coordinator."""
from engine_ext.coordinator.coordinator cimport Coordinator

cdef bint turns_note(Coordinator* c, int number) noexcept nogil
cdef bint turns_append(Coordinator* c) noexcept nogil
cdef void turns_close(Coordinator* c) noexcept nogil
