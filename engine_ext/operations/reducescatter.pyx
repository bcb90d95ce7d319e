"""Reduce-scatter: rank r gets part r of the rows, reduced. If the rows cannot be divided evenly, the first ranks get one more.

The logical buffer has rank 0's part of every tensor, then rank 1's, and so on. A chunk has a compartment for every rank
(data/executor.pxd), so every chunk is work for all ranks. There is no copy stage, since a part has one reader.
"""
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport malloc
from libc.string cimport memset

from engine_ext.data.executor cimport (
    Executor, Steps, compartment, executor_start, identity_of_absent, in_compartment, offer, pack_range, place, plan_add,
    reduce_range,
)
from engine_ext.gpu.device cimport DEVICE_REDUCESCATTER
from engine_ext.operations.op cimport OP_STAND_IN, Member, Op
from engine_ext.operations.operation cimport bytes_of_all, bytes_of_row, choose_scatter
from engine_ext.platform.atomics cimport load32_relaxed
from engine_ext.shared.layout cimport engine_entry, wire_dtype
from engine_ext.shared.rows cimport largest_part
from engine_ext.transport.transport cimport Stage

cdef Steps STEPS = Steps(pack, reduce, NULL, offer_windows, False, False)


cdef Operation reducescatter_row() noexcept:
    cdef Operation row
    memset(&row, 0, sizeof(row))
    row.reduces = row.moves = row.alone = row.parts = row.tells_members = True
    row.work = DEVICE_REDUCESCATTER
    row.bytes, row.choose, row.stand_in, row.plan = bytes_of_all, choose_scatter, stand_in, plan
    return row


cdef void stand_in(Op* op, int size) noexcept nogil:
    op.row_bytes, op.nbytes = <uint64_t>bytes_of_row(&op.meta), <uint64_t>bytes_of_all(&op.meta)


cdef bint plan(Executor* x, Op** batch, const engine_entry* entry) noexcept nogil:
    cdef Op* op = batch[0]
    cdef Member one
    cdef const Member* members = op.members
    cdef uint64_t size = <uint64_t>x.size, longest = 0, r
    if op.meta.group == 0:
        one.source, one.target, one.nbytes = op.source, op.target, op.nbytes
        one.row_bytes, one.rows, one.dtype = op.row_bytes, entry.meta.dims[0], op.meta.dtype
        if load32_relaxed(&op.flags) & OP_STAND_IN:     # memory for a part that nobody reads
            one.target = op.memory = <char*>malloc(max(<uint64_t>1, largest_part(one.rows, x.size) * one.row_bytes))
            if one.target == NULL:
                return False
        members = &one
    for r in range(size):
        x.send_start[r] = x.plan.total
        if not plan_part(x, members, max(op.meta.group, <uint32_t>1), r, entry.meta.wire):
            return False
        x.send_bytes[r] = x.plan.total - x.send_start[r]
        longest = max(longest, x.send_bytes[r])
    executor_start(x, &STEPS, (longest + compartment(x) - 1) // compartment(x))
    return True


cdef bint plan_part(Executor* x, const Member* members, uint32_t count, uint64_t rank, int wire) noexcept nogil:
    """Plan the rows that `rank` gets, of every tensor; False without memory."""
    cdef const Member* member
    cdef uint64_t size = <uint64_t>x.size, rows, first, last
    cdef uint32_t k
    for k in range(count):
        member = &members[k]
        rows = <uint64_t>member.rows
        first = rank * (rows // size) + min(rank, rows % size)
        last = (rank + 1) * (rows // size) + min(rank + 1, rows % size)
        if plan_add(&x.plan, member.source + first * member.row_bytes if member.source != NULL else NULL, member.target,
                    (last - first) * member.row_bytes, member.dtype, wire_dtype(wire, member.dtype), -1) == NULL:
            return False
    return True


cdef inline void find_window(const Executor* x, uint64_t n, int rank, uint64_t* low, uint64_t* high) noexcept nogil:
    """Find [low, high), the range of the logical buffer that chunk n has of the part of `rank`."""
    low[0] = x.send_start[rank] + n * compartment(x)
    high[0] = low[0] + in_compartment(x, x.send_bytes[rank], n * compartment(x))


cdef void pack(Executor* x, uint64_t n) noexcept nogil:
    """Write the next rows of every other rank's part to the slot, and the identity for absent tensors in this rank's part."""
    cdef uint64_t low, high
    cdef int r
    for r in range(x.size):
        find_window(x, n, r, &low, &high)
        if low < high and r == x.rank:
            identity_of_absent(x, place(x, r, n, r), low, low, high)
        elif low < high:
            pack_range(x, place(x, x.rank, n, r), low, low, high)


cdef void offer_windows(Executor* x, Stage stage, uint64_t n) noexcept nogil:
    cdef uint64_t low, high, at
    cdef int r
    for r in range(x.size if stage == Stage.PACKED else 0):
        find_window(x, n, r, &low, &high)
        at = <uint64_t>r * compartment(x)
        if low < high:
            offer(x, r, n, at, at + high - low)


cdef void reduce(Executor* x, uint64_t n) noexcept nogil:
    cdef uint64_t low, high
    find_window(x, n, x.rank, &low, &high)
    if low < high:
        reduce_range(x, n, low - <uint64_t>x.rank * compartment(x), low, high, 1)
