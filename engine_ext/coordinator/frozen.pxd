"""Frozen batches: gradients on GPUs that travel together in every backward pass."""
from libc.stdint cimport uint64_t

from engine_ext.coordinator.coordinator cimport Coordinator, NameState

cdef uint64_t longest_hold(uint64_t warning_ns, uint64_t limit_ns) noexcept nogil
cdef bint frozen_hold(Coordinator* c, NameState* name) noexcept nogil
cdef bint frozen_close(Coordinator* c, bint changed) noexcept nogil
cdef uint64_t frozen_deadline(const Coordinator* c) noexcept nogil
cdef void frozen_dissolve(Coordinator* c, NameState* name) noexcept nogil
cdef void frozen_forget(Coordinator* c, NameState* name) noexcept nogil
cdef void frozen_free(Coordinator* c) noexcept nogil
