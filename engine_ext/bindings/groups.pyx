"""Operations on several tensors: their members, what the ranks compare of them, and the parts of the gathered result.

A gathered group travels as bytes: first the number and length of rows of each member here, then the members, each at a multiple
of 64 bytes. So one request carries any dtypes and any number of rows, and a rank without a tensor sends nothing at all.
"""
from libc.stdlib cimport calloc, free, malloc, qsort

from engine_ext.bindings.memory cimport Memory
from engine_ext.bindings.view cimport expect_dense, view_anywhere
from engine_ext.data.executor cimport PIECE_ALIGNMENT
from engine_ext.kernels.kernels cimport ENGINE_PLAIN, engine_kernels_get
from engine_ext.operations.kinds cimport operation_of
from engine_ext.operations.op cimport Member
from engine_ext.platform.hash cimport fnv, fnv_begin
from engine_ext.shared.layout cimport (
    DIM_DIGEST, DIM_FAULT, DIM_MOVED, DIM_SPARSE, FAULTS, FAULT_NONE, LAYOUT_SPARSE, MAX_DIMS, MAX_GROUP, MAX_RANKS,
)
from engine_ext.shared.rows cimport bounded_product, bounded_sum

from engine_ext.errors import ArgumentError, UnsupportedTensorError

cdef inline uint64_t align_piece(uint64_t nbytes) noexcept nogil:
    """Round `nbytes` up to a multiple of PIECE_ALIGNMENT."""
    return (nbytes + PIECE_ALIGNMENT - 1) // PIECE_ALIGNMENT * PIECE_ALIGNMENT


cdef int group_open(Op* op, int kind, Py_ssize_t count) except -1:
    """Make `op` a group of `count` members, which the caller adds next; raise if that is impossible."""
    if not 0 < count <= MAX_GROUP:
        raise ArgumentError(f"a group has 1 to {MAX_GROUP} tensors, not {count}")
    if not group_begin(op, kind, count):
        raise MemoryError("no memory for a group")
    return 0


cdef bint group_begin(Op* op, int kind, Py_ssize_t count) noexcept nogil:
    """Make `op` a group of `count` members, which is in range. Return False without memory."""
    op.members = <Member*>calloc(<size_t>count, sizeof(Member))
    if op.members == NULL:
        return False
    op.meta.kind, op.meta.group, op.meta.ndim = <unsigned char>kind, <uint32_t>count, 0
    op.meta.dims[DIM_DIGEST] = <int64_t>fnv_begin()
    op.source = op.target = <char*>op.members           # not NULL, so not absent; the members have the memory
    return True


cdef object group_add(Op* op, Py_ssize_t k, object tensor, View* view):
    """View tensor `k` of the group and count it as member `k`; return the object that keeps its memory alive, or None."""
    cdef object keeper = view_anywhere(tensor, view)
    expect_dense(tensor, view, f"tensor {k} of the group")
    group_count(op, k, view)
    return keeper


cdef void group_count(Op* op, Py_ssize_t k, const View* view) noexcept nogil:
    """Make a viewed tensor member `k`, and add it to what the ranks compare. Members must be counted in order."""
    cdef Member* member = &op.members[k]
    cdef uint64_t digest, count = 1
    cdef int64_t* total
    cdef int first = operation_of(&op.meta).uneven, d       # first dimension that must be equal on all ranks
    member.source, member.nbytes, member.dtype = view.data, view.nbytes, view.dtype
    for d in range(1, view.ndim):
        count = bounded_product(count, <uint64_t>view.dims[d])
    member.row_bytes, member.rows = bounded_product(count, <uint64_t>view.itemsize), view.dims[0] if view.ndim else 1
    op.nbytes += view.nbytes
    total = &op.meta.dims[min(<int>view.dtype, <int>DIM_MOVED)]
    total[0] = <int64_t>bounded_sum(<uint64_t>total[0], count if first else view.count)
    digest = <uint64_t>op.meta.dims[DIM_DIGEST]
    digest = fnv(digest, <uint64_t>view.ndim << 16 | <uint64_t>view.dtype << 8 | <unsigned char>view.layout)
    for d in range(first, view.ndim):
        digest = fnv(digest, <uint64_t>view.dims[d])
    op.meta.dims[DIM_DIGEST] = <int64_t>digest
    if k == 0:
        op.meta.dtype = view.dtype


cdef int group_expect_apart(const Op* op) except -1:
    """Raise ArgumentError if tensors of a group that is reduced in place share memory."""
    cdef Extent* extents = <Extent*>calloc(op.meta.group, sizeof(Extent))
    cdef Py_ssize_t count = 0, found
    cdef uint32_t k
    cdef int one = 0, other = 0
    if extents == NULL:
        raise MemoryError("no memory to compare tensors")
    for k in range(op.meta.group):
        if op.members[k].nbytes:
            extents[count].begin, extents[count].end = op.members[k].target, op.members[k].target + op.members[k].nbytes
            extents[count].index = <int>k
            count += 1
    found = first_overlap(extents, count)
    if found >= 0:
        one, other = extents[found - 1].index, extents[found].index
    free(extents)
    if found >= 0:
        raise ArgumentError(
            f"tensors {min(one, other)} and {max(one, other)} of the group share memory: in place each would be reduced twice; "
            "leave one out, or use the form that returns new tensors"
        )
    return 0


cdef int group_gather(Op* op) except -1:
    """Make a complete group the payload of an allgather; raise MemoryError without memory."""
    if not group_payload(op):
        raise MemoryError("no memory for a group")
    return 0


cdef bint group_payload(Op* op) noexcept nogil:
    """Make a complete group the payload of an allgather; return False without memory."""
    cdef uint64_t k, count = op.meta.group
    cdef const Member* member
    op.splits = <int64_t*>malloc(count * 2 * sizeof(int64_t))
    if op.splits == NULL:
        return False
    op.rows, op.row_bytes = <int64_t>align_piece(count * 2 * sizeof(int64_t)), 1
    for k in range(count):
        member = &op.members[k]
        op.splits[2 * k], op.splits[2 * k + 1] = member.rows, <int64_t>member.row_bytes
        op.rows += <int64_t>align_piece(member.nbytes)
    op.nbytes, op.target = <uint64_t>op.rows, NULL
    return True


cdef int group_sparse(Op* op, object shape, object fault) except -1:
    """Make a group of two, indices (row by row) and values, a sparse tensor of `shape`, which is what the ranks compare.

    `fault`: None, or (kind, dimension, number) of what is wrong with it; every rank then refuses it.
    """
    cdef int64_t sparse = <int64_t>op.members[0].row_bytes // 8, k
    if len(shape) > DIM_SPARSE:
        raise UnsupportedTensorError(f"a sparse tensor has at most {DIM_SPARSE} dimensions here, not {len(shape)}")
    if op.members[0].rows != op.members[1].rows:
        raise ValueError(f"a sparse tensor has as many indices as values, not {op.members[0].rows} and {op.members[1].rows}")
    for k in range(MAX_DIMS):
        op.meta.dims[k] = shape[k] if k < len(shape) else 0
    op.meta.dims[DIM_SPARSE] = sparse
    op.meta.dtype, op.meta.layout = <unsigned char>op.members[1].dtype, LAYOUT_SPARSE
    op.meta.ndim, op.meta.shared = <uint32_t>len(shape), -1
    if fault is not None:
        kind, dimension, number = fault
        if not FAULT_NONE < kind < FAULTS:
            raise ValueError(f"no fault has the number {kind}")
        op.meta.fault, op.meta.root, op.meta.dims[DIM_FAULT] = kind, dimension, number
    return 0


cdef uint64_t group_rows(const char* memory, const int64_t* nbytes, int size, uint32_t k, int64_t* rows,
                         uint64_t* row_bytes) noexcept nogil:
    """Write the rows of member `k` from each rank into `rows` and the bytes of a row into `row_bytes` (0: no rank has one).

    Return the bytes of all its rows together.

    Parameters
    ----------
    memory : payloads of all ranks, one after another
    nbytes : bytes of each rank's payload; 0: the rank sent nothing
    """
    cdef uint64_t total = 0
    cdef const int64_t* sent
    cdef int r
    row_bytes[0] = 0
    for r in range(size):
        sent, rows[r] = <const int64_t*>memory, 0
        if nbytes[r]:
            rows[r], row_bytes[0] = sent[2 * k], <uint64_t>sent[2 * k + 1]      # equal on all ranks that have one
            total += <uint64_t>rows[r] * row_bytes[0]
        memory += nbytes[r]
    return total


cdef void group_skip(const char* memory, const int64_t* nbytes, int size, uint32_t count, uint32_t first, uint32_t k,
                     uint64_t* offsets) noexcept nogil:
    """Write the offset of member `k` of `count` in each rank's payload into `offsets`; `memory` and `nbytes` as for group_rows.

    On entry `offsets` holds those of member `first`; with `first` 0 its content is ignored.
    """
    cdef const int64_t* sent
    cdef uint32_t m
    cdef int r
    for r in range(size):
        sent = <const int64_t*>memory
        if first == 0:
            offsets[r] = align_piece(count * 2 * sizeof(int64_t))
        for m in range(first, k if nbytes[r] else first):
            offsets[r] += align_piece(<uint64_t>sent[2 * m] * <uint64_t>sent[2 * m + 1])
        memory += nbytes[r]


cdef void group_copy(const char* memory, const int64_t* nbytes, int size, uint32_t k, uint64_t* offsets, char* to) noexcept nogil:
    """Copy member `k`, the rows of all ranks one after another, from `offsets` in each rank's payload to `to`. Afterwards
    `offsets` are those of member `k` + 1."""
    cdef const int64_t* sent
    cdef uint64_t length
    cdef int r
    for r in range(size):
        if nbytes[r]:
            sent = <const int64_t*>memory
            length = <uint64_t>sent[2 * k] * <uint64_t>sent[2 * k + 1]
            engine_kernels_get(ENGINE_PLAIN).copy(to, memory + offsets[r], length)
            offsets[r] += align_piece(length)
            to += length
        memory += nbytes[r]


cdef list group_parts(const char* memory, const int64_t* nbytes, int size, uint32_t count):
    """Return what was gathered, as a list by member: (its bytes from all ranks, rows of each rank, bytes of a row).

    `memory` and `nbytes` as for group_rows.
    """
    cdef list parts = []
    cdef Memory part
    cdef uint64_t total, row_bytes
    cdef int64_t[MAX_RANKS] rows
    cdef uint64_t[MAX_RANKS] offsets
    cdef uint32_t k
    group_skip(memory, nbytes, size, count, 0, 0, offsets)
    for k in range(count):
        total = group_rows(memory, nbytes, size, k, rows, &row_bytes)
        part = Memory.__new__(Memory)
        part.data, part.nbytes = <char*>malloc(max(total, <uint64_t>1)), total
        if part.data == NULL:
            raise MemoryError("no memory for the result of a group")
        with nogil:
            group_copy(memory, nbytes, size, k, offsets, part.data)
        parts.append((memoryview(part), tuple([rows[r] for r in range(size)]), row_bytes))
    return parts


# ---- overlaps ---------------------------------------------------------------------------------------------------------------

# Overlap of pieces of memory. They are sorted by their beginnings. Each is then compared with the furthest-reaching written and
# read extents before it. If all are written, comparing direct neighbours finds the first overlap.

cdef int by_begin(const void* a, const void* b) noexcept nogil:
    """Order extents by their beginnings, for qsort."""
    cdef const char* x = (<const Extent*>a).begin
    cdef const char* y = (<const Extent*>b).begin
    return (x > y) - (x < y)


cdef Py_ssize_t first_overlap(Extent* extents, Py_ssize_t count) noexcept nogil:
    """Sort extents; return the index of the first that begins inside its predecessor, or -1."""
    cdef Py_ssize_t k
    qsort(extents, <size_t>count, sizeof(Extent), by_begin)
    for k in range(1, count):
        if extents[k].begin < extents[k - 1].end:
            return k
    return -1


cdef bint find_overlap(Extent* extents, Py_ssize_t count, int* one, int* other) noexcept nogil:
    """Return whether two extents overlap of which at least one is written. If so, write the lower of their indices into `one` and
    the higher into `other`."""
    cdef const Extent* x
    cdef const Extent* reaching
    cdef Extent written, read
    cdef Py_ssize_t k
    written.end = read.end = NULL
    for k in range(1, count):
        if extents[k].begin < extents[k - 1].begin:
            qsort(extents, <size_t>count, sizeof(Extent), by_begin)
            break
    for k in range(count):
        x = &extents[k]
        reaching = &written if x.begin < written.end else &read
        if x.begin < reaching.end and not (x.reads and reaching.reads):
            one[0], other[0] = min(x.index, reaching.index), max(x.index, reaching.index)
            return True
        if x.reads and x.end > read.end:
            read = x[0]
        elif not x.reads and x.end > written.end:
            written = x[0]
    return False
