"""Rotate: every rank gets the tensor of the rank before it, the first that of the last. Any dtype."""
from libc.stdint cimport int32_t, uint64_t
from libc.string cimport memset

from engine_ext.data.executor cimport Executor, Steps, chunk_end, copy_range, executor_start, offer, pack_range, slot
from engine_ext.operations.op cimport Op
from engine_ext.operations.operation cimport (
    bytes_of_all, choose_two_shot, chunks_of_plan, give_target, plan_bytes, stand_in_tensor,
)
from engine_ext.shared.layout cimport engine_entry
from engine_ext.transport.transport cimport Stage

cdef Steps STEPS = Steps(pack, NULL, copy, offer_chunk, False, False)


cdef Operation rotate_row() noexcept:
    cdef Operation row
    memset(&row, 0, sizeof(row))
    row.moves = True
    row.bytes, row.choose, row.stand_in, row.plan = bytes_of_all, choose_two_shot, stand_in_tensor, plan
    return row


cdef bint plan(Executor* x, Op** batch, const engine_entry* entry) noexcept nogil:
    cdef int32_t i
    for i in range(<int32_t>entry.items):
        if not (give_target(batch[i]) and plan_bytes(x, batch[i].source, batch[i].target, batch[i].nbytes)):
            return False
    executor_start(x, &STEPS, chunks_of_plan(x))
    return True


cdef void pack(Executor* x, uint64_t n) noexcept nogil:
    cdef uint64_t begin = n * x.chunk
    pack_range(x, slot(x, x.rank, n), begin, begin, chunk_end(x, begin))


cdef void offer_chunk(Executor* x, Stage stage, uint64_t n) noexcept nogil:
    """The rank after this one reads all of it."""
    cdef uint64_t begin = n * x.chunk
    if stage == Stage.PACKED:
        offer(x, (x.rank + 1) % x.size, n, 0, chunk_end(x, begin) - begin)


cdef void copy(Executor* x, uint64_t n) noexcept nogil:
    cdef uint64_t begin = n * x.chunk
    copy_range(x, slot(x, (x.rank + x.size - 1) % x.size, n), begin, begin, chunk_end(x, begin))
