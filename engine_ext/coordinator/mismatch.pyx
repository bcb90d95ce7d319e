"""Mismatches: whether the ranks mean the same by a name, and whether it can be done. If not, a text says what each of them sent.

The caller holds rank 0's driver role.
"""
from libc.stdio cimport snprintf
from libc.string cimport memcmp, memset

from engine_ext.operations.kinds cimport describe_meta, describe_ranks, fit, operation_of
from engine_ext.shared.layout cimport DIM_SPARSE, FAULT_NONE, LAYOUT_SPARSE, MAX_RANKS


cdef bint is_same_meta(const engine_meta* a, const engine_meta* b) noexcept nogil:
    """Return whether two descriptions are equal, apart from the tensor's place in the arena."""
    cdef engine_meta x = a[0]
    x.shared = b.shared
    return memcmp(&x, b, sizeof(engine_meta)) == 0


cdef const engine_meta* first_present(Coordinator* c, NameState* name) noexcept nogil:
    """Return the metadata that the first rank with a tensor submitted; if no rank has one, that of the first rank."""
    cdef int r
    for r in range(c.segment.size):
        if not absent(c, name, r):
            return sent_by(name, r)
    return sent_by(name, bringer(c))


cdef const engine_meta* counts_as(Coordinator* c, NameState* name, int rank, const engine_meta* present) noexcept nogil:
    """Return the metadata that counts as `rank`'s. A rank without a gradient does not know the others': theirs counts,
    whether it is sparse, and in the host's memory its dtype and layout. On a GPU the rank has made room for the result, so
    its own counts."""
    cdef const engine_meta* sent = sent_by(name, rank)
    cdef bint sparse = present.layout == LAYOUT_SPARSE
    cdef engine_meta x
    if not absent(c, name, rank) or (present.device and not sparse):
        return sent
    x = sent[0]
    if sparse:
        x.kind, x.group, x.dims[DIM_SPARSE] = present.kind, present.group, present.dims[DIM_SPARSE]
    x.layout = present.layout
    if not present.device:
        x.dtype, x.wire = present.dtype, present.wire
    return present if is_same_meta(&x, present) else sent


cdef int describe_faults(Coordinator* c, NameState* name, char* text) noexcept nogil:
    """Write what ranks sent that cannot be done whatever the others sent, and whose calls failed before they sent anything.
    Return the length."""
    cdef bint[MAX_RANKS] one
    cdef bint failed
    cdef int at = 0, r
    for r in range(c.segment.size):
        failed = name.requests[r] != NULL and name.requests[r].text != NULL
        if not failed and (c.joined[r] or sent_by(name, r).fault == FAULT_NONE):
            continue
        if at > MISMATCH_BYTES - 512:
            break
        if at:
            at += snprintf(text + at, MISMATCH_BYTES - at, "; ")
        memset(one, 0, sizeof(one))
        one[r] = True
        at += describe_ranks(one, c.segment.numbers, c.segment.size, text + at, MISMATCH_BYTES - at)
        if failed:
            at = fit(at, snprintf(text + at, MISMATCH_BYTES - at, " %s", name.requests[r].text), MISMATCH_BYTES)
            continue
        at += snprintf(text + at, MISMATCH_BYTES - at, " sent ")
        at += describe_meta(sent_by(name, r), text + at, MISMATCH_BYTES - at)
    return at


cdef int describe_mismatch(Coordinator* c, NameState* name, const engine_meta* present, char* text) noexcept nogil:
    """Write what each rank sent, equal ranks together. Return the length; 0: all ranks sent the same, and it can be done."""
    cdef bint[MAX_RANKS] group
    cdef bint[MAX_RANKS] shown
    cdef int at = describe_faults(c, name, text), r, q, groups = 0
    if at:
        return at
    for r in range(c.segment.size):
        shown[r] = c.joined[r]
    for r in range(c.segment.size):
        if shown[r]:
            continue
        memset(group, 0, sizeof(group))
        for q in range(r, c.segment.size):
            if not shown[q] and is_same_meta(counts_as(c, name, q, present), counts_as(c, name, r, present)):
                group[q] = shown[q] = True
        if groups:
            at += snprintf(text + at, MISMATCH_BYTES - at, ", ")
        at += describe_ranks(group, c.segment.numbers, c.segment.size, text + at, MISMATCH_BYTES - at)
        at += snprintf(text + at, MISMATCH_BYTES - at, " sent ")
        at += describe_meta(counts_as(c, name, r, present), text + at, MISMATCH_BYTES - at)
        groups += 1
        if at > MISMATCH_BYTES - 512:
            break
    return at if groups > 1 else describe_joined_root(c, present, text)


cdef int describe_joined_root(Coordinator* c, const engine_meta* meta, char* text) noexcept nogil:
    """Write that the root has joined, and so has nothing to send. Return the length; 0: it has not."""
    cdef int r
    for r in range(c.segment.size if operation_of(meta).rooted else 0):
        if c.joined[r] and c.segment.numbers[r] == meta.root:
            return snprintf(text, MISMATCH_BYTES, "rank %d is the root and has joined", meta.root)
    return 0
