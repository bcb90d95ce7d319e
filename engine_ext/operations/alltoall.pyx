"""All-to-all: every rank sends rows to each rank, and gets rows from each.

In the first chunk every rank tells how many rows it has for each rank. From these numbers all ranks know how many chunks follow,
and each allocates its result. A chunk has a compartment for every rank (data/executor.pxd), however unevenly the rows are split.
In the executor, the fields `send_*` describe this rank's source, `gather_*` its result.
"""
from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport calloc, malloc
from libc.string cimport memcpy, memset

from engine_ext.data.executor cimport Executor, Steps, compartment, executor_start, in_compartment, offer, place, slot
from engine_ext.gpu.device cimport DEVICE_ALLTOALL
from engine_ext.operations.op cimport Op
from engine_ext.operations.operation cimport WRONG_ROW_COUNTS, bytes_of_row, choose_scatter, plan_bytes, stand_in_rows
from engine_ext.platform.atomics cimport load_relaxed
from engine_ext.shared.layout cimport add_bytes, engine_entry, engine_meta
from engine_ext.transport.transport cimport Stage

cdef extern from "platform/memory.h" nogil:
    char* engine_memory_take(uint64_t bytes)

cdef Steps STEPS = Steps(pack, NULL, copy, offer_rows, False, False)


cdef Operation alltoall_row() noexcept:
    cdef Operation row
    memset(&row, 0, sizeof(row))
    row.moves = row.alone = row.uneven = True
    row.bytes, row.choose, row.stand_in = bytes_of_row, choose_scatter, stand_in
    row.plan, row.finish = plan, finish
    row.work, row.count_sizes = DEVICE_ALLTOALL, count_sizes
    return row


cdef int64_t count_sizes(const engine_meta* meta, int size) noexcept nogil:
    """Return one size for each rank: the number of rows that go to it."""
    return size


cdef void stand_in(Op* op, int size) noexcept nogil:
    stand_in_rows(op, size)
    op.splits = <int64_t*>calloc(size, sizeof(int64_t))


cdef bint plan(Executor* x, Op** batch, const engine_entry* entry) noexcept nogil:
    """Plan the first chunk, which determines how many chunks follow; False without memory."""
    cdef Op* op = batch[0]
    cdef uint64_t start = 0
    cdef int r
    op.row_counts = <int64_t*>malloc(x.size * sizeof(int64_t))
    if op.row_counts == NULL or op.splits == NULL or not plan_bytes(x, op.source, NULL, op.nbytes):
        return False
    for r in range(x.size):
        x.send_start[r], x.send_bytes[r] = start, <uint64_t>op.splits[r] * op.row_bytes
        start += x.send_bytes[r]
    x.row_bytes, x.rows_sent, x.rows_received = op.row_bytes, op.splits, op.row_counts
    x.given, x.given_bytes = op.target, op.memory_bytes
    executor_start(x, &STEPS, 1)
    return True


cdef const char* finish(Executor* x, Op** batch) noexcept nogil:
    """Hand the result to the operation; return NULL, or an error."""
    if x.culprit >= 0:
        return WRONG_ROW_COUNTS
    if x.received == NULL:
        return b"out of memory for the result of an all-to-all"
    if x.received != x.given:
        batch[0].memory, batch[0].memory_bytes = x.received, x.gather_start[x.size - 1] + x.gather_bytes[x.size - 1]
    x.received = NULL
    return NULL


cdef void pack(Executor* x, uint64_t n) noexcept nogil:
    cdef uint64_t begin, nbytes
    cdef int r
    if n == 0:
        memcpy(slot(x, x.rank, 0), x.rows_sent, <size_t>x.size * sizeof(int64_t))
        return
    begin = (n - 1) * compartment(x)
    for r in range(x.size):
        nbytes = in_compartment(x, x.send_bytes[r], begin)
        if nbytes and r != x.rank:
            x.kernels.copy(place(x, x.rank, n, r), x.plan.pieces[0].source + x.send_start[r] + begin, nbytes)


cdef void offer_rows(Executor* x, Stage stage, uint64_t n) noexcept nogil:
    """Offer the numbers of rows to all ranks, then each rank its rows."""
    cdef uint64_t at
    cdef int r
    if stage == Stage.PACKED and n == 0:
        offer(x, -1, 0, 0, <uint64_t>x.size * 8)
    elif stage == Stage.PACKED:
        for r in range(x.size):
            at = <uint64_t>r * compartment(x)
            offer(x, r, n, at, at + in_compartment(x, x.send_bytes[r], (n - 1) * compartment(x)))


cdef void begin_receiving(Executor* x) noexcept nogil:
    """Read from every rank how many rows it sends, and allocate the result. All ranks see the same numbers. Each is read only
    once, since a malicious peer may overwrite it meanwhile."""
    cdef const uint64_t* sent
    cdef uint64_t longest = 0, total = 0, all_of_rank
    cdef int64_t rows
    cdef int r, s
    for s in range(x.size):
        sent, all_of_rank = <const uint64_t*>slot(x, s, 0), 0
        for r in range(x.size):
            rows = <int64_t>load_relaxed(&sent[r])
            if not add_bytes(&all_of_rank, rows, x.row_bytes):
                x.culprit = s
                return
            longest = max(longest, <uint64_t>rows * x.row_bytes)
            if r == x.rank:
                x.rows_received[s] = rows
        x.gather_bytes[s], x.gather_start[s] = <uint64_t>x.rows_received[s] * x.row_bytes, total
        total += x.gather_bytes[s]
    x.received = x.given if x.given != NULL and total == x.given_bytes else engine_memory_take(total)
    x.end += (longest + compartment(x) - 1) // compartment(x)


cdef void copy(Executor* x, uint64_t n) noexcept nogil:
    cdef uint64_t begin, nbytes
    cdef int s
    if n == 0:
        begin_receiving(x)
        return
    if x.received == NULL:          # no memory: `finish` reports it, so that the other ranks are not kept waiting
        return
    begin = (n - 1) * compartment(x)
    for s in range(x.size):
        nbytes = in_compartment(x, x.gather_bytes[s], begin)
        if nbytes:
            x.kernels.copy(x.received + x.gather_start[s] + begin,
                           place(x, s, n, x.rank) if s != x.rank else x.plan.pieces[0].source + x.send_start[s] + begin, nbytes)
