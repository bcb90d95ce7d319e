"""The coordinator's reports for people: who waits for whom, and how ranks disagree."""
from libc.stdint cimport int32_t, uint64_t

from engine_ext.coordinator.coordinator cimport Coordinator, NameState
from engine_ext.shared.layout cimport engine_meta
from engine_ext.shared.segment cimport bit

cdef enum Standoff:
    NONE = 0        # no rank lacks a name
    ONE_SIDED = 1   # some ranks wait for others
    MUTUAL = 2      # some ranks wait for each other

cdef Standoff wait_report_describe(Coordinator* c, int culprit, char* text, int room) noexcept nogil
cdef bint wait_report_overdue(Coordinator* c, uint64_t seen, uint64_t warning_ns, char* text, int room) noexcept nogil
cdef int wait_report_absentee(Coordinator* c, int rank, int32_t id) noexcept nogil

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
