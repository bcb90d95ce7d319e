"""A group's tensors, told to ranks that have joined.

A rank that stands in knows how many tensors a group has, and how many elements of each dtype. That is not enough where each
tensor has rows or weights of its own: a grouped reduce-scatter, and Adasum. So such an entry has ENTRY_MEMBERS and begins with
a broadcast: a rank that has submitted the groups says what their tensors are. Then every rank plans the operation itself. While
no rank has joined nothing of this travels.
"""
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, malloc, realloc

from engine_ext.operations.broadcast cimport broadcast_memory
from engine_ext.operations.kinds cimport operation_of
from engine_ext.operations.op cimport OP_STAND_IN, Member, Op
from engine_ext.platform.atomics cimport load32_relaxed


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
    """The broadcast is over: give the groups that this rank stands in for their tensors. False without memory."""
    cdef const member_shape* told = e.member_shapes
    cdef int32_t i
    for i in range(<int32_t>entry.items):
        if (load32_relaxed(&e.batch[i].flags) & OP_STAND_IN and e.batch[i].meta.group
                and not make_members(e.batch[i], told, e.segment.size)):
            return False
        told += e.batch[i].meta.group
    return True


cdef bint make_members(Op* op, const member_shape* told, int size) noexcept nogil:
    """Tensors that are absent, all with the same memory for results that nobody wants. False without memory."""
    cdef uint64_t longest = 1
    cdef int64_t rows
    cdef Member* member
    cdef uint32_t k
    op.members = <Member*>calloc(op.meta.group, sizeof(Member))
    if op.members == NULL:
        return False
    for k in range(op.meta.group):
        member = &op.members[k]
        member.rows, member.row_bytes, member.dtype = told[k].rows, <uint64_t>told[k].row_bytes, <int>told[k].dtype
        member.nbytes = <uint64_t>member.rows * member.row_bytes
        rows = member.rows // size + 1 if operation_of(&op.meta).parts else member.rows
        longest = max(longest, <uint64_t>rows * member.row_bytes)
    if op.meta.device:
        return True             # where results go that nobody wants, the lane knows
    op.target = op.memory = <char*>malloc(longest)
    for k in range(op.meta.group):
        op.members[k].target = op.memory
    return op.memory != NULL
