"""Do the ranks mean the same by a name, and can it be done? If not, what each of them sent, in words. The caller holds rank 0's
driver role."""
from libc.stdio cimport snprintf
from libc.string cimport memcmp, memset

from engine_ext.operations.describe cimport describe_meta, describe_ranks, fit
from engine_ext.operations.kinds cimport operation_of
from engine_ext.shared.layout cimport DIM_SPARSE, FAULT_NONE, LAYOUT_SPARSE, MAX_RANKS


cdef bint same(const engine_meta* a, const engine_meta* b) noexcept nogil:
    """Equal but for where in the arena the tensor lies."""
    cdef engine_meta x = a[0]
    x.shared = b.shared
    return memcmp(&x, b, sizeof(engine_meta)) == 0


cdef const engine_meta* first_present(Coordinator* c, NameState* name) noexcept nogil:
    """The metadata that the first rank with a tensor submitted; without any, that of the first rank."""
    cdef int r
    for r in range(c.segment.size):
        if not absent(c, name, r):
            return sent_by(name, r)
    return sent_by(name, bringer(c))


cdef const engine_meta* counts_as(Coordinator* c, NameState* name, int rank, const engine_meta* present) noexcept nogil:
    """The metadata that counts as `rank`'s. A rank without a gradient cannot know what the others' is: theirs counts, whether
    it is sparse, and in the host's memory its dtype and layout. On a GPU the rank has made room for the result."""
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
    return present if same(&x, present) else sent


cdef int complain_of_faults(Coordinator* c, NameState* name, char* text) noexcept nogil:
    """What ranks sent that cannot be done, whatever the others sent, and on which the call failed before they sent anything."""
    cdef bint[MAX_RANKS] one
    cdef bint failed
    cdef int at = 0, r
    for r in range(c.segment.size):
        failed = name.requests[r] != NULL and name.requests[r].text != NULL
        if not failed and (c.joined[r] or sent_by(name, r).fault == FAULT_NONE):
            continue
        if at > COMPLAINT_BYTES - 512:
            break
        if at:
            at += snprintf(text + at, COMPLAINT_BYTES - at, "; ")
        memset(one, 0, sizeof(one))
        one[r] = True
        at += describe_ranks(one, c.segment.numbers, c.segment.size, text + at, COMPLAINT_BYTES - at)
        if failed:
            at = fit(at, snprintf(text + at, COMPLAINT_BYTES - at, " %s", name.requests[r].text), COMPLAINT_BYTES)
            continue
        at += snprintf(text + at, COMPLAINT_BYTES - at, " sent ")
        at += describe_meta(sent_by(name, r), text + at, COMPLAINT_BYTES - at)
    return at


cdef int complain(Coordinator* c, NameState* name, const engine_meta* present, char* text) noexcept nogil:
    """What each rank sent, equal ranks together. Empty when all sent the same and it can be done."""
    cdef bint[MAX_RANKS] group
    cdef bint[MAX_RANKS] told
    cdef int at = complain_of_faults(c, name, text), r, q, groups = 0
    if at:
        return at
    for r in range(c.segment.size):
        told[r] = c.joined[r]
    for r in range(c.segment.size):
        if told[r]:
            continue
        memset(group, 0, sizeof(group))
        for q in range(r, c.segment.size):
            if not told[q] and same(counts_as(c, name, q, present), counts_as(c, name, r, present)):
                group[q] = told[q] = True
        if groups:
            at += snprintf(text + at, COMPLAINT_BYTES - at, ", ")
        at += describe_ranks(group, c.segment.numbers, c.segment.size, text + at, COMPLAINT_BYTES - at)
        at += snprintf(text + at, COMPLAINT_BYTES - at, " sent ")
        at += describe_meta(counts_as(c, name, r, present), text + at, COMPLAINT_BYTES - at)
        groups += 1
        if at > COMPLAINT_BYTES - 512:
            break
    return at if groups > 1 else complain_of_joined(c, present, text)


cdef int complain_of_joined(Coordinator* c, const engine_meta* meta, char* text) noexcept nogil:
    """A root that has joined has nothing to give."""
    cdef int r
    for r in range(c.segment.size if operation_of(meta).rooted else 0):
        if c.joined[r] and c.segment.numbers[r] == meta.root:
            return snprintf(text, COMPLAINT_BYTES, "rank %d is the root and has joined", meta.root)
    return 0
