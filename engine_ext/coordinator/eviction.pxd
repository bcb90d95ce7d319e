"""How ids become free again."""
from engine_ext.coordinator.coordinator cimport Coordinator

cdef void eviction_begin(Coordinator* c, int wanted) noexcept nogil
cdef void eviction_end(Coordinator* c) noexcept nogil
