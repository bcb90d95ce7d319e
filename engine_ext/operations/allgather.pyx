"""Allgather: every rank gets the rows of all ranks, in rank order. Ranks may have different numbers of rows.

So every submission tells its number of rows, and the entry tells all ranks the rows of each. A chunk carries the next rows of
every rank.

A group is gathered as bytes: the number of rows and the row length of each member, then the members, each at a multiple of 64. A
rank without tensors sends no bytes.
"""
from libc.stdint cimport int64_t, uint32_t
from libc.stdlib cimport malloc
from libc.string cimport memcpy, memset

from engine_ext.data.executor cimport PIECE_ALIGNMENT, Steps, chunk_end, executor_start, offer, pack_range, plan_clear, slot
from engine_ext.gpu.device cimport DEVICE_ALLGATHER
from engine_ext.kernels.kernels cimport dtype_bytes
from engine_ext.operations.op cimport Op
from engine_ext.operations.operation cimport (
    SAYS_ROWS, WRONG_ROW_COUNTS, bytes_of_row, choose_two_shot, plan_bytes, stand_in_rows,
)
from engine_ext.shared.layout cimport (
    DIM_SPARSE, LAYOUT_SPARSE, add_padded_bytes, engine_entry, engine_meta, entry_rows,
)
from engine_ext.shared.rows cimport bounded_product
from engine_ext.transport.transport cimport Stage

cdef extern from "platform/memory.h" nogil:
    char* engine_memory_take(uint64_t bytes)

cdef Steps STEPS = Steps(pack, NULL, copy, offer_rows, False, False)


cdef Operation allgather_row() noexcept:
    cdef Operation row
    memset(&row, 0, sizeof(row))
    row.says = SAYS_ROWS
    row.moves = row.alone = row.uneven = True
    row.bytes, row.choose, row.stand_in = bytes_of_row, choose_two_shot, stand_in_rows
    row.plan, row.finish = plan, finish
    row.work, row.count_sizes = DEVICE_ALLGATHER, count_sizes
    return row


cdef int64_t count_sizes(const engine_meta* meta, int size) noexcept nogil:
    """Return two sizes for each tensor of a group: its rows and the bytes of a row. For a single tensor the entry has them."""
    return 2 * <int64_t>meta.group


cdef bint allgather_memory(Executor* x, uint64_t chunk, char* own, uint64_t nbytes, char* all) noexcept nogil:
    """Gather memory of the engine, equally long on all ranks, before an entry's own data; False without memory."""
    cdef int r
    plan_clear(&x.plan)
    x.streaming = x.needs_pack = x.timed = False
    x.root, x.chunk, x.gathered = -1, chunk, all
    x.reduction.prescale = 1.0
    for r in range(x.size):
        x.gather_bytes[r], x.gather_start[r] = nbytes, <uint64_t>r * nbytes
    if not plan_bytes(x, own, NULL, nbytes):
        return False
    executor_start(x, &STEPS, (nbytes + chunk - 1) // chunk)
    return True


cdef bint plan(Executor* x, Op** batch, const engine_entry* entry) noexcept nogil:
    """Plan one tensor or group; False without memory. Only the entry tells the size of the result. It goes into the given target
    if that has this size and is for one tensor, else into memory that is allocated here."""
    cdef Op* op = batch[0]
    cdef const int64_t* rows = entry_rows(entry)
    cdef uint64_t given = op.memory_bytes, longest = 0, row_bytes = <uint64_t>bytes_of_row(&entry.meta)
    cdef int r
    op.memory_bytes = 0
    for r in range(x.size):
        x.gather_bytes[r], x.gather_start[r] = <uint64_t>rows[r] * row_bytes, op.memory_bytes
        op.memory_bytes += x.gather_bytes[r]
        longest = max(longest, x.gather_bytes[r])
    op.row_counts = <int64_t*>malloc(x.size * sizeof(int64_t))
    x.gathered = op.target
    if op.target == NULL or entry.meta.group or op.memory_bytes != given:
        op.memory = x.gathered = engine_memory_take(op.memory_bytes)
    if op.row_counts == NULL or x.gathered == NULL:
        return False
    memcpy(op.row_counts, rows, x.size * sizeof(int64_t))
    x.reduction.prescale = 1.0                      # gathered values are not scaled
    if op.members != NULL:
        if not plan_members(x, op):
            return False
    elif rows[x.rank] and not plan_bytes(x, op.source, NULL, op.nbytes):
        return False
    executor_start(x, &STEPS, (longest + x.chunk - 1) // x.chunk)
    # With several hosts every rank waits all the same, so that the frames of all ranks keep pace with the chunks.
    x.takes_nothing = x.gather_bytes[x.rank] == op.memory_bytes and x.crews.hosts == 1
    return True


cdef const char* finish(Executor* x, Op** batch) noexcept nogil:
    """Check that each rank's part of a group is as long as the numbers at its beginning say, since readers rely on them. A rank
    without a tensor has not declared a group itself."""
    cdef const engine_meta* meta = &batch[0].record.meta
    cdef const char* memory = batch[0].memory
    cdef const int64_t* like = NULL
    cdef int r, k
    for r in range(x.size if meta.group else 0):
        if x.gather_bytes[r] % PIECE_ALIGNMENT:         # it would misalign the parts behind it, too
            x.culprit = r
            return WRONG_ROW_COUNTS
    r = x.rank
    for k in range(x.size if meta.group else 0):        # this rank's own part first
        if x.gather_bytes[r] and not is_whole_group(meta, like, memory + x.gather_start[r], x.gather_bytes[r]):
            x.culprit = r
            return WRONG_ROW_COUNTS
        if x.gather_bytes[r] and like == NULL:
            like = <const int64_t*>(memory + x.gather_start[r])
        r = k if k < x.rank else k + 1
    return NULL


cdef bint is_whole_group(const engine_meta* meta, const int64_t* like, const char* part, uint64_t nbytes) noexcept nogil:
    """Return whether a rank's part has the members that its numbers say, with rows as long as in the part `like`, unless NULL."""
    cdef uint64_t numbers = <uint64_t>meta.group * 2 * sizeof(int64_t), total = 0, k
    cdef const int64_t* sent = <const int64_t*>part
    if nbytes < numbers or not add_padded_bytes(&total, <int64_t>numbers, 1, PIECE_ALIGNMENT):
        return False
    if meta.layout == LAYOUT_SPARSE and not are_entries(meta, sent):
        return False
    for k in range(meta.group):
        if not add_padded_bytes(&total, sent[2 * k], <uint64_t>sent[2 * k + 1], PIECE_ALIGNMENT):
            return False
        if like != NULL and sent[2 * k + 1] != like[2 * k + 1]:
            return False
    return total == nbytes


cdef bint are_entries(const engine_meta* meta, const int64_t* sent) noexcept nogil:
    """Return whether two tensors can be the indices and the values of a sparse tensor."""
    cdef uint64_t value_bytes = <uint64_t>dtype_bytes(meta.dtype)
    cdef uint32_t d
    for d in range(<uint32_t>meta.dims[DIM_SPARSE], meta.ndim):
        value_bytes = bounded_product(value_bytes, <uint64_t>meta.dims[d])
    return (sent[0] == sent[2] and sent[1] == meta.dims[DIM_SPARSE] * <int64_t>sizeof(int64_t)
            and <uint64_t>sent[3] == value_bytes)


cdef bint plan_members(Executor* x, const Op* op) noexcept nogil:
    """Plan the numbers and the members of a group; False without memory."""
    cdef uint32_t k
    if not plan_bytes(x, <char*>op.splits, NULL, op.meta.group * 2 * sizeof(int64_t)):
        return False
    for k in range(op.meta.group):
        if not plan_bytes(x, op.members[k].source, NULL, op.members[k].nbytes):
            return False
    return True


cdef void pack(Executor* x, uint64_t n) noexcept nogil:
    """Write the next chunk of this rank's rows to its slot, and to its place in this rank's result."""
    cdef uint64_t begin = n * x.chunk, end = chunk_end(x, begin)
    if begin >= end:
        return
    if x.size > 1:
        pack_range(x, slot(x, x.rank, n), begin, begin, end)
    if x.gathered + x.gather_start[x.rank] != x.plan.pieces[0].source:      # else a single tensor's rows lie there already
        pack_range(x, x.gathered + x.gather_start[x.rank] + begin, begin, begin, end)


cdef void offer_rows(Executor* x, Stage stage, uint64_t n) noexcept nogil:
    cdef uint64_t begin = n * x.chunk, end = chunk_end(x, begin)
    if stage == Stage.PACKED and begin < end:
        offer(x, -1, n, 0, end - begin)


cdef void copy(Executor* x, uint64_t n) noexcept nogil:
    cdef uint64_t begin = n * x.chunk
    cdef int r
    for r in range(x.size):
        if r != x.rank and begin < x.gather_bytes[r]:
            x.kernels.copy(x.gathered + x.gather_start[r] + begin, slot(x, r, n), min(x.chunk, x.gather_bytes[r] - begin))
