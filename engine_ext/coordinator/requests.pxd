"""Requests of the ranks: the names that the coordinator knows, and the open requests for them."""
from engine_ext.coordinator.coordinator cimport Coordinator, NameState
from engine_ext.platform.atomics cimport load_acquire

cdef inline bint requests_wait(const Coordinator* c, int rank) noexcept nogil:
    """Return whether `rank` has requests that were not drained yet."""
    return load_acquire(&c.segment.pages[rank].request_head) != c.request_tail[rank]      # pairs with write_request

cdef void requests_drain(Coordinator* c, int rank) noexcept nogil
cdef void requests_clear(Coordinator* c, NameState* name) noexcept nogil
cdef void requests_forget(Coordinator* c, NameState* name) noexcept nogil
cdef void requests_close(Coordinator* c) noexcept nogil

cdef void eviction_begin(Coordinator* c, int count) noexcept nogil
cdef void eviction_end(Coordinator* c) noexcept nogil

cdef bint turns_note(Coordinator* c, int number) noexcept nogil
cdef bint turns_append(Coordinator* c) noexcept nogil
cdef void turns_close(Coordinator* c) noexcept nogil
