"""Mismatches: what each rank submitted under a name, and how the ranks disagree about it."""
from engine_ext.coordinator.coordinator cimport Coordinator, NameState
from engine_ext.shared.layout cimport engine_meta
from engine_ext.shared.segment cimport bit

cdef enum:
    MISMATCH_BYTES = 4096

cdef const engine_meta* first_present(Coordinator* c, NameState* name) noexcept nogil
cdef int describe_mismatch(Coordinator* c, NameState* name, const engine_meta* present, char* text) noexcept nogil

cdef inline const engine_meta* sent_by(NameState* name, int rank) noexcept nogil:
    """Return the metadata that `rank` submitted: its open request's, or, for a bit, the name's."""
    return &name.requests[rank].meta if name.requests[rank] != NULL else &name.meta

cdef inline bint absent(Coordinator* c, NameState* name, int rank) noexcept nogil:
    """Return whether `rank` has no tensor for a name: it submitted none, or it has joined."""
    if c.joined[rank]:
        return True
    return name.requests[rank].absent if name.requests[rank] != NULL else bit(c.segment.pages[rank].absent, name.id)

cdef inline int bringer(Coordinator* c) noexcept nogil:
    """Return the first rank that has not joined. There is one while any name is submitted by all."""
    cdef int r
    for r in range(c.segment.size):
        if not c.joined[r]:
            break
    return r
