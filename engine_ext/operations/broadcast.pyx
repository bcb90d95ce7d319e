"""Broadcast: every rank gets the tensors of one rank, the root. They travel as bytes, so dtypes without kernels work, too."""
from libc.stdint cimport int32_t
from libc.string cimport memset

from engine_ext.data.executor cimport (
    Cut, Steps, chunk_end, copy_range, cut_range, executor_start, next_piece, offer, pack_range, plan_clear, slot,
)
from engine_ext.gpu.device cimport DEVICE_BROADCAST
from engine_ext.operations.op cimport Op
from engine_ext.operations.operation cimport (
    bytes_of_all, choose_two_shot, chunks_of_plan, give_target, plan_bytes, stand_in_tensor,
)
from engine_ext.shared.layout cimport engine_entry
from engine_ext.transport.transport cimport Stage

cdef Steps STEPS = Steps(pack, NULL, copy, offer_all, False, False)


cdef Operation broadcast_row() noexcept:
    cdef Operation row
    memset(&row, 0, sizeof(row))
    row.moves = row.rooted = True
    row.work = DEVICE_BROADCAST
    row.bytes, row.choose, row.stand_in, row.plan = bytes_of_all, choose_two_shot, stand_in_tensor, plan
    return row


cdef bint plan(Executor* x, Op** batch, const engine_entry* entry) noexcept nogil:
    cdef int32_t i
    for i in range(<int32_t>entry.items):
        if not (give_target(batch[i]) and plan_bytes(x, batch[i].source, batch[i].target, batch[i].nbytes)):
            return False
    executor_start(x, &STEPS, chunks_of_plan(x))
    return True


cdef bint broadcast_memory(Executor* x, int root, uint64_t chunk, char* memory, uint64_t nbytes) noexcept nogil:
    """Broadcast memory of the engine, equally long on all ranks, before an entry's own data; False without memory."""
    plan_clear(&x.plan)
    x.streaming = x.needs_pack = x.timed = False
    x.root, x.chunk = root, chunk
    x.reduction.prescale = 1.0
    if not plan_bytes(x, memory if x.rank == root else NULL, memory, nbytes):
        return False
    executor_start(x, &STEPS, chunks_of_plan(x))
    return True


cdef void pack(Executor* x, uint64_t n) noexcept nogil:
    cdef uint64_t begin = n * x.chunk
    if x.rank == x.root and x.size > 1:
        pack_range(x, slot(x, x.rank, n), begin, begin, chunk_end(x, begin))


cdef void offer_all(Executor* x, Stage stage, uint64_t n) noexcept nogil:
    cdef uint64_t begin = n * x.chunk
    if stage == Stage.PACKED and x.rank == x.root:
        offer(x, -1, n, 0, chunk_end(x, begin) - begin)


cdef void copy(Executor* x, uint64_t n) noexcept nogil:
    """Copy from the root's slot to the tensors. The root itself copies from its sources to its targets, if these differ."""
    cdef uint64_t begin = n * x.chunk, end = chunk_end(x, begin)
    cdef Cut cut
    if x.rank != x.root:
        copy_range(x, slot(x, x.root, n), begin, begin, end)
        return
    cut = cut_range(&x.plan, begin, end)
    while next_piece(&x.plan, &cut):
        x.kernels.copy(cut.piece.target + (cut.low - cut.piece.start), cut.piece.source + (cut.low - cut.piece.start),
                       cut.high - cut.low)
