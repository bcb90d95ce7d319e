"""Items that only move: what each rank gets of every tensor on a GPU.

The lane needs to know how many bytes come from each rank. Of an allgather of one tensor the entry tells how many rows each rank
has. Before an all-to-all, or an allgather of a group, ranks tell each other by a small allgather of host memory: how many rows go
to each, or how many rows each tensor has and how long one is. Results are as long as that, so a thread with the framework's
allocator makes room for them (`bindings/rooms.pyx`) when the item has been handed over.

`row_counts` of the operation is what its caller is told: of each tensor the rows of all ranks; of a group's, the bytes of a row
behind them.
"""
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, malloc, realloc
from libc.string cimport memcpy, memset

from engine_ext.gpu.device cimport DEVICE_EXCHANGE, device_parcel
from engine_ext.operations.gather cimport gather_memory
from engine_ext.operations.kinds cimport operation_of
from engine_ext.operations.op cimport Op
from engine_ext.operations.operation cimport bytes_of_row
from engine_ext.shared.layout cimport add_bytes, entry_rows


cdef inline uint64_t numbers_of(const State* e, const engine_entry* entry) noexcept nogil:
    """How many numbers each rank tells the others first."""
    return <uint64_t>(operation_of(&entry.meta).told(&entry.meta, e.segment.size)
                      if operation_of(&entry.meta).told != NULL else 0)


cdef bint tells_numbers(const State* e, const engine_entry* entry) noexcept nogil:
    """Whether ranks tell each other numbers before an entry of tensors on a GPU is handed over."""
    return numbers_of(e, entry) != 0


cdef bint numbers_tell(State* e, const engine_entry* entry) noexcept nogil:
    """Begin to. A rank that has joined, or has no tensor, tells zeros. False without memory."""
    cdef const int64_t* splits = e.batch[0].splits
    cdef uint64_t count = numbers_of(e, entry), all = count * <uint64_t>(e.segment.size + 1)
    cdef int64_t* told
    if all > e.told_room:
        told = <int64_t*>realloc(e.told, all * sizeof(int64_t))
        if told == NULL:
            return False
        e.told, e.told_room = told, all
    told = e.told + (all - count)
    if splits != NULL:
        memcpy(told, splits, count * sizeof(int64_t))
    else:
        memset(told, 0, count * sizeof(int64_t))
    return gather_memory(&e.executor, entry.chunk, <char*>told, count * sizeof(int64_t), <char*>e.told)


cdef bint numbers_heard(State* e, const engine_entry* entry) noexcept nogil:
    """All ranks have told their numbers: whether they can be, else the executor knows whose cannot."""
    cdef uint64_t count = numbers_of(e, entry), row_bytes = <uint64_t>bytes_of_row(&entry.meta), total, k
    cdef const int64_t* told = e.told
    cdef int r
    for r in range(e.segment.size if count else 0):
        total = 0
        for k in range(<uint64_t>entry.meta.group if entry.meta.group else count):
            if not (add_bytes(&total, told[2 * k], <uint64_t>told[2 * k + 1]) if entry.meta.group
                    else add_bytes(&total, told[k], row_bytes)):
                e.executor.culprit = r
                return False
        told += count
    return True


cdef bint make_parcels(device_item* item, uint64_t count, uint64_t size, bint sends) noexcept nogil:
    """`count` parcels, in one piece of memory with the numbers of bytes. False without it."""
    cdef uint64_t each = size * (2 if sends else 1), k
    cdef char* memory = <char*>calloc(1, count * (sizeof(device_parcel) + each * sizeof(uint64_t)))
    cdef uint64_t* numbers = <uint64_t*>(memory + count * sizeof(device_parcel))
    if memory == NULL:
        return False
    item.parcels, item.n_parcels = <device_parcel*>memory, <int>count
    for k in range(count):
        item.parcels[k].received = numbers + k * each
        if sends:
            item.parcels[k].sent = numbers + k * each + size
    return True


cdef void fill_exchange(const State* e, device_parcel* parcel, Op* op, uint64_t row_bytes) noexcept nogil:
    """What comes from each rank, and what goes there."""
    cdef int size = e.segment.size, r
    parcel.source = <uint64_t>op.source
    for r in range(size):
        op.row_counts[r] = e.told[r * size + e.segment.rank]
        parcel.received[r] = <uint64_t>op.row_counts[r] * row_bytes
        parcel.sent[r] = <uint64_t>e.told[e.segment.rank * size + r] * row_bytes


cdef void fill_rows(const State* e, device_parcel* parcel, Op* op, const int64_t* rows, uint64_t row_bytes) noexcept nogil:
    """The rows of each rank, of a tensor alone."""
    cdef int r
    parcel.source = <uint64_t>op.source
    for r in range(e.segment.size):
        op.row_counts[r], parcel.received[r] = rows[r], <uint64_t>rows[r] * row_bytes


cdef void fill_member(const State* e, device_parcel* parcel, Op* op, uint32_t k, uint64_t numbers) noexcept nogil:
    """The same, of tensor `k` of a group. A rank that has nothing does not know how long a row is, either."""
    cdef int size = e.segment.size, r
    cdef int64_t* rows = op.row_counts + <uint64_t>k * <uint64_t>(size + 1)
    cdef const int64_t* told
    rows[size] = 0
    for r in range(size):
        told = e.told + <uint64_t>r * numbers + 2 * <uint64_t>k
        rows[r], rows[size] = told[0], max(rows[size], told[1])
        parcel.received[r] = <uint64_t>told[0] * <uint64_t>told[1]
    parcel.source = <uint64_t>op.members[k].source if op.members != NULL else 0


cdef bint add_parcels(const State* e, device_item* item, const engine_entry* entry) noexcept nogil:
    """What the operation in `batch` moves: the same on every rank but for addresses. False without memory."""
    cdef Op* op = e.batch[0]
    cdef uint32_t group = entry.meta.group, k
    cdef uint64_t size = <uint64_t>e.segment.size, row_bytes = <uint64_t>bytes_of_row(&entry.meta)
    op.row_counts = <int64_t*>malloc((<uint64_t>group * (size + 1) if group else size) * sizeof(int64_t))
    if op.row_counts == NULL or not make_parcels(item, max(group, <uint32_t>1), size, item.work == DEVICE_EXCHANGE):
        return False
    if item.work == DEVICE_EXCHANGE:
        fill_exchange(e, item.parcels, op, row_bytes)
    elif group == 0:
        fill_rows(e, item.parcels, op, entry_rows(entry), row_bytes)
    for k in range(group):
        fill_member(e, &item.parcels[k], op, k, numbers_of(e, entry))
    return True
