"""Exchange of sizes between ranks before an entry is planned: rows that move on GPUs, and the tensors of groups."""
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, malloc, realloc
from libc.string cimport memcpy, memset

from engine_ext.gpu.device cimport DEVICE_ALLTOALL, device_transfer
from engine_ext.kernels.kernels cimport ENGINE_DTYPES, dtype_bytes
from engine_ext.operations.allgather cimport allgather_memory
from engine_ext.operations.broadcast cimport broadcast_memory
from engine_ext.operations.kinds cimport operation_of
from engine_ext.operations.op cimport OP_STAND_IN, Member, Op
from engine_ext.operations.operation cimport bytes_of_row
from engine_ext.platform.atomics cimport load32_relaxed
from engine_ext.shared.layout cimport add_bytes, engine_meta, entry_rows, member_shape
from engine_ext.shared.rows cimport largest_part


cdef inline uint64_t sizes_of(const State* e, const engine_entry* entry) noexcept nogil:
    """Return how many integers each rank sends the others before the entry."""
    return <uint64_t>(operation_of(&entry.meta).count_sizes(&entry.meta, e.segment.size)
                      if operation_of(&entry.meta).count_sizes != NULL else 0)


cdef bint exchanges_sizes(const State* e, const engine_entry* entry) noexcept nogil:
    """Return whether ranks exchange sizes before an entry of tensors on a GPU is handed over."""
    return sizes_of(e, entry) != 0


cdef bint sizes_send(State* e, const engine_entry* entry) noexcept nogil:
    """Start the exchange of sizes. A rank that has joined, or has no tensor, sends zeros. False without memory."""
    cdef const int64_t* splits = e.batch[0].splits
    cdef uint64_t count = sizes_of(e, entry), all = count * <uint64_t>(e.segment.size + 1)
    cdef int64_t* sizes
    if all > e.sizes_room:
        sizes = <int64_t*>realloc(e.sizes, all * sizeof(int64_t))
        if sizes == NULL:
            return False
        e.sizes, e.sizes_room = sizes, all
    sizes = e.sizes + (all - count)
    if splits != NULL:
        memcpy(sizes, splits, count * sizeof(int64_t))
    else:
        memset(sizes, 0, count * sizeof(int64_t))
    return allgather_memory(&e.executor, entry.chunk, <char*>sizes, count * sizeof(int64_t), <char*>e.sizes)


cdef bint sizes_receive(State* e, const engine_entry* entry) noexcept nogil:
    """Check the sizes of all ranks when they have arrived. False for wrong ones; `culprit` of the executor is then their rank."""
    cdef uint64_t count = sizes_of(e, entry), row_bytes = <uint64_t>bytes_of_row(&entry.meta), total, k
    cdef const int64_t* sizes = e.sizes
    cdef int r
    for r in range(e.segment.size if count else 0):
        total = 0
        for k in range(<uint64_t>entry.meta.group if entry.meta.group else count):
            if not (add_bytes(&total, sizes[2 * k], <uint64_t>sizes[2 * k + 1]) if entry.meta.group
                    else add_bytes(&total, sizes[k], row_bytes)):
                e.executor.culprit = r
                return False
        sizes += count
    return True


cdef bint make_moves(device_item* item, uint64_t count, uint64_t size, bint sends) noexcept nogil:
    """Allocate `count` transfers for `size` ranks, in one piece of memory with their numbers of bytes. False without memory."""
    cdef uint64_t each = size * (2 if sends else 1), k
    cdef char* memory = <char*>calloc(1, count * (sizeof(device_transfer) + each * sizeof(uint64_t)))
    cdef uint64_t* numbers = <uint64_t*>(memory + count * sizeof(device_transfer))
    if memory == NULL:
        return False
    item.transfers, item.n_transfers = <device_transfer*>memory, <int>count
    for k in range(count):
        item.transfers[k].received = numbers + k * each
        if sends:
            item.transfers[k].sent = numbers + k * each + size
    return True


cdef void fill_exchange(const State* e, device_transfer* transfer, Op* op, uint64_t row_bytes) noexcept nogil:
    """Fill in the transfer of an all-to-all: the bytes that come from each rank and that go there."""
    cdef int size = e.segment.size, r
    transfer.source = <uint64_t>op.source
    for r in range(size):
        op.row_counts[r] = e.sizes[r * size + e.segment.rank]
        transfer.received[r] = <uint64_t>op.row_counts[r] * row_bytes
        transfer.sent[r] = <uint64_t>e.sizes[e.segment.rank * size + r] * row_bytes


cdef void fill_rows(const State* e, device_transfer* transfer, Op* op, const int64_t* rows, uint64_t row_bytes) noexcept nogil:
    """Fill in the transfer of a single gathered tensor: the bytes that come from each rank."""
    cdef int r
    transfer.source = <uint64_t>op.source
    for r in range(e.segment.size):
        op.row_counts[r], transfer.received[r] = rows[r], <uint64_t>rows[r] * row_bytes


cdef void fill_member(const State* e, device_transfer* transfer, Op* op, uint32_t k, uint64_t numbers) noexcept nogil:
    """Fill in the transfer of tensor `k` of a gathered group. The row length is the largest: a rank without a tensor does not
    know it."""
    cdef int size = e.segment.size, r
    cdef int64_t* rows = op.row_counts + <uint64_t>k * <uint64_t>(size + 1)
    cdef const int64_t* sizes
    rows[size] = 0
    for r in range(size):
        sizes = e.sizes + <uint64_t>r * numbers + 2 * <uint64_t>k
        rows[r], rows[size] = sizes[0], max(rows[size], sizes[1])
        transfer.received[r] = <uint64_t>sizes[0] * <uint64_t>sizes[1]
    transfer.source = <uint64_t>op.members[k].source if op.members != NULL else 0


cdef bint add_moves(const State* e, device_item* item, const engine_entry* entry) noexcept nogil:
    """Fill in what the operation in `batch` moves, which is equal on all ranks except for addresses. False without memory."""
    cdef Op* op = e.batch[0]
    cdef uint32_t group = entry.meta.group, k
    cdef uint64_t size = <uint64_t>e.segment.size, row_bytes = <uint64_t>bytes_of_row(&entry.meta)
    op.row_counts = <int64_t*>malloc((<uint64_t>group * (size + 1) if group else size) * sizeof(int64_t))
    if op.row_counts == NULL or not make_moves(item, max(group, <uint32_t>1), size, item.work == DEVICE_ALLTOALL):
        return False
    if item.work == DEVICE_ALLTOALL:
        fill_exchange(e, item.transfers, op, row_bytes)
    elif group == 0:
        fill_rows(e, item.transfers, op, entry_rows(entry), row_bytes)
    for k in range(group):
        fill_member(e, &item.transfers[k], op, k, sizes_of(e, entry))
    return True


# ---- groups of ranks that have joined ---------------------------------------------------------------------------------------

# Shapes of a group's tensors, sent to ranks that have joined.
#
# A rank that stands in knows how many tensors a group has, and how many elements of each dtype. That is not enough where each
# tensor has rows or weights of its own: a grouped reduce-scatter, and Adasum. Such an entry has ENTRY_MEMBERS and begins with a
# broadcast, in which a rank that has submitted the groups sends the shapes. Then every rank plans the operation itself. While no
# rank has joined, no shapes are sent.

cdef bint members_send(State* e, const engine_entry* entry) noexcept nogil:
    """Start the broadcast of shapes. False without memory."""
    cdef bint tells = e.segment.rank == entry.id
    cdef uint64_t total = 0, nbytes
    cdef member_shape* shapes
    cdef const Member* member
    cdef int32_t i
    cdef uint32_t k
    for i in range(<int32_t>entry.items):
        total += e.batch[i].meta.group
    nbytes = total * sizeof(member_shape)
    if total > e.member_room:
        shapes = <member_shape*>realloc(e.member_shapes, nbytes)
        if shapes == NULL:
            return False
        e.member_shapes, e.member_room = shapes, total
    shapes = e.member_shapes
    for i in range(<int32_t>entry.items if tells else 0):
        for k in range(e.batch[i].meta.group):
            member = &e.batch[i].members[k]
            shapes.rows, shapes.row_bytes, shapes.dtype = member.rows, <int64_t>member.row_bytes, member.dtype
            shapes += 1
    return broadcast_memory(&e.executor, entry.id, entry.chunk, <char*>e.member_shapes, nbytes)


cdef bint members_receive(State* e, const engine_entry* entry) noexcept nogil:
    """End the broadcast: give the groups that this rank stands in for their tensors. False without memory, or if the shapes
    cannot be; `culprit` of the executor is then their sender."""
    cdef const member_shape* shapes = e.member_shapes
    cdef int32_t i
    for i in range(<int32_t>entry.items):
        if e.batch[i].meta.group and not shapes_match(shapes, &e.batch[i].meta):
            e.executor.culprit = entry.id
            return False
        if (load32_relaxed(&e.batch[i].flags) & OP_STAND_IN and e.batch[i].meta.group
                and not make_members(e.batch[i], shapes, e.segment.size)):
            return False
        shapes += e.batch[i].meta.group
    return True


cdef bint shapes_match(const member_shape* shapes, const engine_meta* meta) noexcept nogil:
    """Return whether a group can have tensors of these shapes: as many elements of each dtype as `meta` says."""
    cdef uint64_t[ENGINE_DTYPES] found
    cdef uint64_t row_bytes
    cdef uint32_t k
    cdef int d
    memset(found, 0, sizeof(found))
    for k in range(meta.group):
        if not 0 <= shapes[k].dtype < ENGINE_DTYPES:
            return False
        row_bytes = <uint64_t>shapes[k].row_bytes
        if (row_bytes % <uint64_t>dtype_bytes(<int>shapes[k].dtype)
                or not add_bytes(&found[shapes[k].dtype], shapes[k].rows, row_bytes)):
            return False
    for d in range(ENGINE_DTYPES):
        if found[d] != <uint64_t>(meta.dims[d] * dtype_bytes(d)):
            return False
    return True


cdef bint make_members(Op* op, const member_shape* shapes, int size) noexcept nogil:
    """Give a group absent tensors, whose unwanted results share one piece of memory. False without memory."""
    cdef uint64_t longest = 1
    cdef uint64_t rows
    cdef Member* member
    cdef uint32_t k
    op.members = <Member*>calloc(op.meta.group, sizeof(Member))
    if op.members == NULL:
        return False
    for k in range(op.meta.group):
        member = &op.members[k]
        member.rows, member.row_bytes, member.dtype = shapes[k].rows, <uint64_t>shapes[k].row_bytes, <int>shapes[k].dtype
        member.nbytes = <uint64_t>member.rows * member.row_bytes
        rows = largest_part(member.rows, size) if operation_of(&op.meta).parts else <uint64_t>member.rows
        longest = max(longest, rows * member.row_bytes)
    if op.meta.device:
        return True             # the CUDA thread knows where unwanted results go
    op.target = op.memory = <char*>malloc(longest)
    for k in range(op.meta.group):
        op.members[k].target = op.memory
    return op.memory != NULL
