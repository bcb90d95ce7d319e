"""Whether the ranks mean the same by a name."""
from engine_ext.control.coordinator cimport Coordinator, Name
from engine_ext.control.layout cimport KIND_ALLREDUCE, KIND_BROADCAST, KIND_REDUCESCATTER, engine_meta
from engine_ext.control.table cimport bit
from engine_ext.data.kernels cimport ENGINE_ADASUM

cdef enum:
    COMPLAINT_BYTES = 4096

cdef const engine_meta* first_present(Coordinator* c, Name* name) noexcept nogil
cdef int complain(Coordinator* c, Name* name, const engine_meta* present, char* text) noexcept nogil

cdef inline const engine_meta* sent_by(Name* name, int rank) noexcept nogil:
    """What `rank` brought: its open request, or by its bit the metadata on file."""
    return &name.requests[rank].meta if name.requests[rank] != NULL else &name.meta

cdef inline bint absent(Coordinator* c, Name* name, int rank) noexcept nogil:
    """Whether `rank` has no tensor: it brought that, or it has joined."""
    if c.joined[rank]:
        return True
    return name.requests[rank].absent if name.requests[rank] != NULL else bit(c.segment.pages[rank].absent, name.id)

cdef inline bint needs_all(const engine_meta* meta) noexcept nogil:
    """What a rank that has joined may not be able to stand in for: a root's part, and a group's, of which it does not know where
    one tensor ends, when each has weights or rows of its own."""
    return meta.kind == KIND_BROADCAST or meta.group != 0 and (
        meta.kind == KIND_REDUCESCATTER or (meta.kind == KIND_ALLREDUCE and meta.op == ENGINE_ADASUM))
