"""A group's tensors, told to ranks that have joined.

A rank that stands in knows how many tensors a group has, and how many elements of each dtype. That is not enough where each
tensor has rows or weights of its own: a grouped reduce-scatter, and Adasum. So such an entry has ENTRY_MEMBERS and begins with
a broadcast: a rank that has submitted the groups says what their tensors are. Then every rank plans the operation itself. While
no rank has joined nothing of this travels.
"""
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, malloc, realloc
from libc.string cimport memset

from engine_ext.kernels.kernels cimport ENGINE_DTYPES, dtype_bytes
from engine_ext.operations.broadcast cimport broadcast_memory
from engine_ext.operations.kinds cimport operation_of
from engine_ext.operations.op cimport OP_STAND_IN, Member, Op
from engine_ext.platform.atomics cimport load32_relaxed
from engine_ext.shared.layout cimport add_bytes, engine_meta
from engine_ext.shared.rows cimport largest_part


cdef bint members_tell(State* e, const engine_entry* entry) noexcept nogil:
    """Begin the broadcast. False without memory."""
    cdef bint tells = e.segment.rank == entry.id
    cdef uint64_t total = 0, nbytes
    cdef member_shape* told
    cdef const Member* member
    cdef int32_t i
    cdef uint32_t k
    for i in range(<int32_t>entry.items):
        total += e.batch[i].meta.group
    nbytes = total * sizeof(member_shape)
    if total > e.member_room:
        told = <member_shape*>realloc(e.member_shapes, nbytes)
        if told == NULL:
            return False
        e.member_shapes, e.member_room = told, total
    told = e.member_shapes
    for i in range(<int32_t>entry.items if tells else 0):
        for k in range(e.batch[i].meta.group):
            member = &e.batch[i].members[k]
            told.rows, told.row_bytes, told.dtype = member.rows, <int64_t>member.row_bytes, member.dtype
            told += 1
    return broadcast_memory(&e.executor, entry.id, entry.chunk, <char*>e.member_shapes, nbytes)


cdef bint members_heard(State* e, const engine_entry* entry) noexcept nogil:
    """The broadcast is over: give the groups that this rank stands in for their tensors. False without memory, or if
    what was told of them cannot be."""
    cdef const member_shape* told = e.member_shapes
    cdef int32_t i
    for i in range(<int32_t>entry.items):
        if e.batch[i].meta.group and not are_of(told, &e.batch[i].meta):
            e.executor.culprit = entry.id
            return False
        if (load32_relaxed(&e.batch[i].flags) & OP_STAND_IN and e.batch[i].meta.group
                and not make_members(e.batch[i], told, e.segment.size)):
            return False
        told += e.batch[i].meta.group
    return True


cdef bint are_of(const member_shape* told, const engine_meta* meta) noexcept nogil:
    """Whether a group can have such tensors: as many elements of each dtype as it says."""
    cdef uint64_t[ENGINE_DTYPES] found
    cdef uint64_t row_bytes
    cdef uint32_t k
    cdef int d
    memset(found, 0, sizeof(found))
    for k in range(meta.group):
        if not 0 <= told[k].dtype < ENGINE_DTYPES:
            return False
        row_bytes = <uint64_t>told[k].row_bytes
        if row_bytes % <uint64_t>dtype_bytes(<int>told[k].dtype) or not add_bytes(&found[told[k].dtype], told[k].rows, row_bytes):
            return False
    for d in range(ENGINE_DTYPES):
        if found[d] != <uint64_t>(meta.dims[d] * dtype_bytes(d)):
            return False
    return True


cdef bint make_members(Op* op, const member_shape* told, int size) noexcept nogil:
    """Tensors that are absent, all with the same memory for results that nobody wants. False without memory."""
    cdef uint64_t longest = 1
    cdef uint64_t rows
    cdef Member* member
    cdef uint32_t k
    op.members = <Member*>calloc(op.meta.group, sizeof(Member))
    if op.members == NULL:
        return False
    for k in range(op.meta.group):
        member = &op.members[k]
        member.rows, member.row_bytes, member.dtype = told[k].rows, <uint64_t>told[k].row_bytes, <int>told[k].dtype
        member.nbytes = <uint64_t>member.rows * member.row_bytes
        rows = largest_part(member.rows, size) if operation_of(&op.meta).parts else <uint64_t>member.rows
        longest = max(longest, rows * member.row_bytes)
    if op.meta.device:
        return True             # where results go that nobody wants, the lane knows
    op.target = op.memory = <char*>malloc(longest)
    for k in range(op.meta.group):
        op.members[k].target = op.memory
    return op.memory != NULL
