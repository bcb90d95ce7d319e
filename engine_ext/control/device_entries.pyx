"""Entries of tensors on a GPU: handed to the CUDA thread, and completed when it has enqueued them.

The driver passes such an entry at once, and never calls the GPU. From then on its operations are OP_TAKEN: nobody submits them
again or looks whether other ranks lack them. The CUDA thread ends its items in the order of the schedule. It touches
no operation once the world has failed: fail_everything has failed them under the lock, and their owners may free them.
bindings/memory.pyx says when their memory is freed.
"""
from libc.stdint cimport int32_t, uint32_t, uint64_t
from libc.stdio cimport snprintf
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

from engine_ext.control.completion cimport complete_op, wake_any_waiter
from engine_ext.control.observers cimport (
    observe_completions, observe_device, observe_enqueued, observe_handover, observe_passed, observe_sample,
)
from engine_ext.control.size_exchange cimport add_moves
from engine_ext.control.table cimport table_dismiss, table_finish
from engine_ext.control.turns cimport turns_hand, turns_want
from engine_ext.data.executor cimport fill_identity
from engine_ext.gpu.device cimport (
    DEVICE_ALLGATHER, DEVICE_ALLREDUCE, DEVICE_ALLTOALL, DEVICE_NAME, DEVICE_OUTSTANDING, DEVICE_REDUCESCATTER, device_item,
    device_mark, device_part, device_queue, device_row, device_sample,
)
from engine_ext.kernels.kernels cimport ENGINE_DTYPES, ENGINE_SUM, ENGINE_UINT8, dtype_bytes
from engine_ext.operations.kinds cimport operation_of
from engine_ext.operations.op cimport OP_STAND_IN, OP_TAKEN, Member, Op, Record
from engine_ext.operations.operation cimport Operation
from engine_ext.platform.atomics cimport load32_relaxed, now_ns, or32, store_pointer
from engine_ext.platform.clock cimport patience_at
from engine_ext.platform.doors cimport door_ring
from engine_ext.platform.posix cimport pthread_mutex_lock, pthread_mutex_unlock
from engine_ext.shared.layout cimport CAUSE_RAISED, ENTRY_NEEDS_PACK, Status, wire_dtype
from engine_ext.shared.segment cimport abort_world, coordinates, place_of

cdef enum:
    ALIGNMENT = 16              # alignment in bytes of a tensor in the slab: the kernels read so much at once

cdef uint64_t NO_TICKET_YET = <uint64_t>-1      # a ticket that counts as passed when nothing of ours runs on the device any more


# ---- an item ----------------------------------------------------------------------------------------------------------------

cdef void free_item(device_item* item) noexcept nogil:
    free(item.transfers)
    free(item.parts)
    free(item.sources)
    free(item.targets)
    free(item.ready)
    free(item.ops)
    free(item)


cdef device_item* make_item(const State* e, const engine_entry* entry) noexcept nogil:
    """Allocate an item with room for the operations in `batch`; NULL without memory."""
    cdef device_item* item = <device_item*>calloc(1, sizeof(device_item))
    cdef const Operation* operation = operation_of(&entry.meta)
    cdef size_t rows = 0, i
    cdef Op* op
    if item == NULL:
        return NULL
    for i in range(entry.items):
        op = e.batch[i]
        rows += op.meta.group + <size_t>ENGINE_DTYPES if op.meta.group else 1
    rows *= <size_t>e.segment.size if operation.parts else 1
    # A single rank gets the whole.
    item.work = DEVICE_ALLREDUCE if operation.parts and e.segment.size == 1 else operation.work
    item.parts = <device_part*>calloc(rows, sizeof(device_part))
    item.sources = <device_row*>calloc(rows, sizeof(device_row))
    item.targets = <device_row*>calloc(rows, sizeof(device_row))
    item.ready = <device_mark**>calloc(entry.items + 1, sizeof(device_mark*))       # one more for the mark of a result's room
    item.ops = <void**>calloc(entry.items, sizeof(void*))
    if item.parts == NULL or item.sources == NULL or item.targets == NULL or item.ready == NULL or item.ops == NULL:
        free_item(item)
        return NULL
    return item


cdef device_part* add_part(device_item* item, int dtype, int wire, int op) noexcept nogil:
    """Append a part of one dtype that travels as `wire`, with the identity of the reduction `op`."""
    cdef device_part* part = &item.parts[item.n_parts]
    item.n_parts += 1
    part.dtype, part.wire, part.begin, part.end = dtype, wire, item.n_rows, item.n_rows
    fill_identity(<char*>&part.identity, wire, op, <uint64_t>(8 // dtype_bytes(wire)))
    return part


cdef void add_row(device_item* item, device_part* part, const char* source, const char* target, uint64_t nbytes) noexcept nogil:
    """Append a tensor to a part, behind the last one and without a gap."""
    cdef device_row* row = &item.sources[item.n_rows]
    row.offset, row.bytes = part.bytes, nbytes // <uint64_t>dtype_bytes(part.dtype) * <uint64_t>dtype_bytes(part.wire)
    item.targets[item.n_rows] = row[0]
    row.tensor, item.targets[item.n_rows].tensor = <uint64_t>source, <uint64_t>target
    part.bytes += row.bytes
    item.n_rows += 1
    part.end = item.n_rows


cdef void add_group(device_item* item, const Op* op, int entry_wire) noexcept nogil:
    """Append a group's tensors by dtype and without gaps. A rank that has joined knows only the numbers of elements, and has the
    same slab."""
    cdef device_part* part
    cdef const Member* member
    cdef uint32_t k
    cdef int d
    for d in range(ENGINE_DTYPES):
        if not op.meta.dims[d]:
            continue
        part = add_part(item, d, wire_dtype(entry_wire, d), op.meta.op)
        if op.members == NULL:
            add_row(item, part, NULL, NULL, <uint64_t>(op.meta.dims[d] * dtype_bytes(d)))
        for k in range(op.meta.group if op.members != NULL else 0):
            member = &op.members[k]
            if member.dtype == d and member.nbytes:
                add_row(item, part, member.source, member.target, member.nbytes)


cdef void add_share(const State* e, device_item* item, device_part* part, const Member* member, int rank) noexcept nogil:
    """Append the rows of a tensor that `rank` gets."""
    cdef uint64_t rows = <uint64_t>member.rows, size = <uint64_t>e.segment.size, r = <uint64_t>rank
    cdef uint64_t first = r * (rows // size) + min(r, rows % size), last = (r + 1) * (rows // size) + min(r + 1, rows % size)
    cdef const char* source = member.source + first * member.row_bytes if member.source != NULL else NULL
    if last > first and member.row_bytes:
        add_row(item, part, source, member.target if rank == e.segment.rank else NULL, (last - first) * member.row_bytes)


cdef void fill_scatter(const State* e, device_item* item, const engine_entry* entry) noexcept nogil:
    """Fill in a reduce-scatter: for each dtype, a part for every rank with its rows of every tensor."""
    cdef const Op* op = e.batch[0]
    cdef const Member* members = op.members
    cdef device_part* part
    cdef Member one
    cdef uint32_t k
    cdef int d, r
    if entry.meta.group == 0:
        one.source, one.target, one.row_bytes, one.rows = op.source, op.target, op.row_bytes, entry.meta.dims[0]
        one.dtype, members = op.meta.dtype, &one
    for d in range(ENGINE_DTYPES):
        if (entry.meta.dims[d] == 0) if entry.meta.group else (one.dtype != d):
            continue
        for r in range(e.segment.size):
            part = add_part(item, d, wire_dtype(entry.meta.wire, d), entry.meta.op)
            for k in range(max(entry.meta.group, <uint32_t>1)):
                if members[k].dtype == d:
                    add_share(e, item, part, &members[k], r)


cdef uint64_t common_place(const State* e, const device_item* item, uint32_t items) noexcept nogil:
    """Return the address at which the results of the item's one part lie as they do in the slab; 0: they do not. That is this
    rank's affair: it changes neither what travels together nor the calls."""
    cdef uint64_t place = 0
    cdef const device_row* row
    cdef uint32_t i
    if item.parts[0].dtype != item.parts[0].wire:
        return 0
    for i in range(items):
        row = &item.targets[i]
        if row.bytes == 0:
            continue
        if not e.batch[i].placed:
            return 0
        if place == 0:
            place = row.tensor - row.offset
        if row.tensor - row.offset != place:
            return 0
    return place


cdef void fill_item(const State* e, device_item* item, const engine_entry* entry) noexcept nogil:
    """Fill in the plan of the operations in `batch`, which is equal on all ranks except for addresses."""
    cdef device_part* part = NULL
    cdef Op* op
    cdef int32_t i
    for i in range(<int32_t>entry.items):
        op = e.batch[i]
        if op.meta.group:
            add_group(item, op, entry.meta.wire)
            part = NULL
            continue
        if part == NULL and item.work == DEVICE_ALLREDUCE:
            part = add_part(item, op.meta.dtype, wire_dtype(entry.meta.wire, op.meta.dtype), entry.meta.op)
        elif part == NULL:
            part = add_part(item, ENGINE_UINT8, ENGINE_UINT8, ENGINE_SUM)       # a broadcast moves bytes
        part.bytes = (part.bytes + ALIGNMENT - 1) & ~<uint64_t>(ALIGNMENT - 1)
        add_row(item, part, op.source, op.target, op.nbytes)
    if item.n_parts == 1 and item.n_rows == <int>entry.items and item.work == DEVICE_ALLREDUCE and not entry.meta.group:
        item.parts[0].place = common_place(e, item, entry.items)


cdef bint plan_item(const State* e, device_item* item, const engine_entry* entry) noexcept nogil:
    """Plan what is done with the operations in `batch`. False without memory."""
    item.op, item.prescale, item.postscale = entry.meta.op, entry.meta.prescale, entry.meta.postscale
    item.root = place_of(&e.segment, entry.meta.root)
    item.lacking = entry.flags & ENTRY_NEEDS_PACK != 0
    if item.work == DEVICE_ALLGATHER or item.work == DEVICE_ALLTOALL:
        item.unallocated = not load32_relaxed(&e.batch[0].flags) & OP_STAND_IN
        return add_moves(e, item, entry)
    if item.work == DEVICE_REDUCESCATTER:
        fill_scatter(e, item, entry)
    else:
        fill_item(e, item, entry)
    item.in_place = (entry.items == 1 and item.n_parts > 0 and item.parts[0].dtype == item.parts[0].wire and not entry.meta.group
                     and not item.lacking)
    return True


cdef void mark_taken(State* e, device_item* item, const engine_entry* entry) noexcept nogil:
    """Mark the operations in `batch` as taken by the CUDA thread. The caller holds the lock."""
    cdef Op* op
    cdef uint64_t now = patience_at(e.clock, now_ns())
    cdef int32_t i
    for i in range(<int32_t>entry.items):
        op = e.batch[i]
        if load32_relaxed(&op.flags) & OP_STAND_IN:     # only its rows are needed, and the next stand-in may come at once
            e.batch[i] = NULL
            table_finish(&e.table, op, Status.OK)
            table_dismiss(op)
            continue
        op.taken = now
        if op.mark != NULL and (item.n_ready == 0 or item.ready[item.n_ready - 1] != op.mark):
            item.ready[item.n_ready] = op.mark
            item.n_ready += 1
        item.ops[item.n_ops] = op
        item.n_ops += 1
        op.mark, op.ticket = NULL, NO_TICKET_YET
        or32(&op.flags, OP_TAKEN)


cdef bint give_to_cuda_thread(State* e, const engine_entry* entry) noexcept nogil:
    """Hand a BATCH whose operations are in `batch` over to the CUDA thread. False without memory."""
    cdef device_item* item
    cdef device_queue* queue = e.queue
    item = make_item(e, entry)
    if item == NULL:
        return False
    if not plan_item(e, item, entry):
        free_item(item)
        return False
    item.owner, item.ended, item.queue = e, handle_item_end, queue
    item.sequence, item.bytes = entry.sequence, entry.bytes
    observe_handover(e, entry)
    pthread_mutex_lock(&e.lock)
    observe_completions(e, entry)
    mark_taken(e, item, entry)
    e.handed += 1
    e.world.device.push(e.world.device, item)
    if load32_relaxed(&item.unallocated):      # the CUDA thread waits for the room, and ends the item under the lock
        want_room(e, item)
    pthread_mutex_unlock(&e.lock)
    if queue != NULL:
        turns_hand(e.world, queue)
        if coordinates(&e.segment):
            turns_want(e.world, queue)
    return True


cdef void use_device(State* e, device* d) noexcept nogil:
    """Hand entries over to this device from now on. Called for the world's engine; the device is closed before the engine is
    freed."""
    d.owner = e
    observe_device(e, d.ordinal)
    store_pointer(<void**>&d.failed, <void*>device_failed)      # pairs with the CUDA thread's look: the owner is set
    store_pointer(<void**>&d.went_on, <void*>device_went_on)    # likewise
    store_pointer(<void**>&d.sampled, <void*>device_sampled)    # likewise
    store_pointer(<void**>&e.device, d)                         # pairs with device_watch


cdef void stop_device(State* e) noexcept nogil:
    """Have the CUDA thread enqueue nothing more, because the world has failed."""
    if e.device != NULL and e.device.stop != NULL:
        e.device.stop(e.device)


# ---- items whose results have no room yet: their sizes were not known before ------------------------------------------------

cdef void want_room(State* e, device_item* item) noexcept nogil:
    """Ask a thread to make room for an item's results (bindings/devices.pyx). The caller holds the lock."""
    cdef device_item** last = &e.unallocated
    while last[0] != NULL:
        last = &last[0].next_roomless
    last[0] = item
    door_ring(&e.allocation_door, 1)


cdef void want_no_room(State* e, const device_item* item) noexcept nogil:
    """Cancel that, because the CUDA thread ends the item, with room or without. The caller holds the lock."""
    cdef device_item** at = &e.unallocated
    if e.allocating == item:
        e.allocating = NULL
    while at[0] != NULL and at[0] != item:
        at = &at[0].next_roomless
    if at[0] != NULL:
        at[0] = at[0].next_roomless


# ---- functions of the CUDA thread ----------------------------------------------------------------------------------------------

cdef void device_failed(device* d, const char* why) noexcept nogil:
    """End the world, because a kernel has failed or the GPU is gone. Called by the CUDA thread."""
    cdef State* e = <State*>d.owner
    abort_world(&e.segment, e.segment.rank, CAUSE_RAISED, why)


cdef void device_went_on(device* d, uint64_t tickets) noexcept nogil:
    observe_passed(<State*>d.owner, tickets)


cdef void device_sampled(device* d, const device_sample* sample) noexcept nogil:
    observe_sample(<State*>d.owner, sample)


cdef void return_marks(device* d, device_item* item) noexcept nogil:
    """Release the marks of an item."""
    cdef int k
    for k in range(item.n_ready):
        d.unmark(d, item.ready[k])


cdef void describe_item(const device_item* item, char* text) noexcept nogil:
    """Write which operations an item carries. The caller holds the lock."""
    cdef const Record* record = (<const Op*>item.ops[0]).record if item.n_ops else NULL     # none: this rank has joined
    if record != NULL:
        snprintf(text, DEVICE_NAME, "'%.*s'", <int>record.name_bytes, record.name)
    else:
        snprintf(text, DEVICE_NAME, "what other ranks submitted")


cdef void name_ticket(State* world, uint64_t ticket, const char* text) noexcept nogil:
    """Remember what travels with a ticket, for a report that it does not end."""
    pthread_mutex_lock(&world.lock)
    memcpy(world.device.names[(ticket - 1) % DEVICE_OUTSTANDING], text, DEVICE_NAME)
    pthread_mutex_unlock(&world.lock)


cdef void handle_item_end(device_item* item, const char* why) noexcept nogil:
    """Complete the operations of an item that the CUDA thread has enqueued (`why` NULL), or end the world because it cannot.
    Frees the item."""
    cdef State* e = <State*>item.owner
    cdef char[DEVICE_NAME] name
    cdef bint complete_them
    cdef int k
    if why != NULL:
        abort_world(&e.segment, e.segment.rank, CAUSE_RAISED, why)
    return_marks(e.world.device, item)
    pthread_mutex_lock(&e.lock)
    if why == NULL:
        observe_enqueued(e.world)
    want_no_room(e, item)
    complete_them = why == NULL and not load32_relaxed(&e.failed)
    if complete_them:
        describe_item(item, name)
    e.returned, e.last_ticket = e.returned + 1, item.ticket
    for k in range(item.n_ops if complete_them else 0):
        (<Op*>item.ops[k]).ticket = item.ticket
        table_finish(&e.table, <Op*>item.ops[k], Status.OK)
    pthread_mutex_unlock(&e.lock)
    if complete_them:
        name_ticket(e.world, item.ticket, name)
    for k in range(item.n_ops if complete_them else 0):
        complete_op(e, <Op*>item.ops[k])
    if complete_them:
        wake_any_waiter(e)
    free_item(item)
