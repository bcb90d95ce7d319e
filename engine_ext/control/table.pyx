"""Names on one rank. The caller holds the engine's lock; nothing here waits."""
from libc.stdint cimport uint16_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcmp, memcpy, memset, strlen

from engine_ext.coordinator.names cimport Named, names_add, names_close, names_find, names_open, names_remove
from engine_ext.operations.kinds cimport operation_of
from engine_ext.operations.op cimport OP_STAND_IN, OP_TAKEN, fails
from engine_ext.platform.atomics cimport (
    load32_relaxed, load_acquire, now_ns, store32_relaxed, store32_release, store_pointer, store_relaxed, store_release,
)
from engine_ext.platform.clock cimport patience_at
from engine_ext.shared.layout cimport IDS, REQUEST_BYTES, Status, engine_request, rank_page
from engine_ext.shared.segment cimport away, bit, flip_bit_relaxed, flip_bit_release, to_coordinator_time, visible


cdef int table_open(Table* table, Segment* segment, const patience* clock) noexcept nogil:
    """Initialize a table; OK or NO_MEMORY. The caller closes it in both cases."""
    memset(table, 0, sizeof(Table))
    table.segment, table.clock = segment, clock
    table.by_id = <Record**>calloc(IDS, sizeof(Record*))
    return Status.OK if names_open(&table.names) and table.by_id != NULL else Status.NO_MEMORY


cdef void table_close(Table* table) noexcept nogil:
    """Free all names."""
    names_close(&table.names, NULL, NULL)
    free(table.by_id)
    memset(table, 0, sizeof(Table))


cdef Record* table_record(Table* table, const char* name, uint32_t name_bytes) noexcept nogil:
    """Return the record of `name`, made if it is new; NULL without memory."""
    cdef Named* named = names_find(&table.names, name, name_bytes)
    if named == NULL:
        named = names_add(&table.names, name, name_bytes, sizeof(Record))
    return <Record*>named


cdef void table_release(Table* table, Record* record) noexcept nogil:
    """Free the record of a name that nothing refers to any more; else do nothing."""
    if record.id < 0 and record.inflight == NULL and record.pins == 0:
        names_remove(&table.names, <Named*>record)


cdef engine_request* room_for_request(const Table* table, uint32_t bytes, uint64_t* head) noexcept nogil:
    """Return the place for a request of `bytes` on this rank's ring, and in `head` the ring's head behind it. NULL when the
    coordinator has to drain the ring first."""
    cdef rank_page* page = table.segment.mine
    cdef uint64_t tail = load_acquire(&table.segment.coordinator.drained[table.segment.rank])  # pairs with requests_drain
    cdef uint64_t begin = page.request_head
    cdef uint32_t left = REQUEST_BYTES - <uint32_t>(begin % REQUEST_BYTES)
    if begin + bytes + (left if left < bytes else 0) - tail > REQUEST_BYTES:
        return NULL
    if left < bytes:            # it does not fit before the ring's end: mark that, and go on at the start
        (<uint32_t*>(page.requests + begin % REQUEST_BYTES))[0] = 0
        begin += left
    head[0] = begin + bytes
    return <engine_request*>(page.requests + begin % REQUEST_BYTES)


cdef int write_request(Table* table, Record* record, Op* op) noexcept nogil:
    """Write the full request to this rank's ring; OK, or NO_ROOM when the coordinator has to drain it first."""
    cdef uint64_t head = 0
    cdef uint32_t text_bytes = <uint32_t>strlen(op.text) if fails(op) else 0
    cdef uint32_t bytes = (<uint32_t>sizeof(engine_request) + record.name_bytes + text_bytes + 7) & ~<uint32_t>7
    cdef engine_request* request = room_for_request(table, bytes, &head)
    if request == NULL:
        return Status.NO_ROOM
    request.bytes, request.name_bytes, request.turn = bytes, <uint16_t>record.name_bytes, 0
    request.absent = op.source == NULL and op.nbytes > 0
    request.rows, request.submitted = op.rows, to_coordinator_time(table.segment, op.submitted)
    request.text_bytes, request.optimizer, request.meta = text_bytes, op.optimizer, op.meta
    memcpy(<char*>request + sizeof(engine_request), record.name, record.name_bytes)
    if text_bytes:
        memcpy(<char*>request + sizeof(engine_request) + record.name_bytes, op.text, text_bytes)
    op.requested = True
    store_release(&table.segment.mine.request_head, head)   # pairs with requests_drain
    return Status.OK


cdef int table_request_turn(Table* table, int number) noexcept nogil:
    """Request a turn for the process set `number`: OK or NO_ROOM."""
    cdef rank_page* page = table.segment.mine
    cdef uint64_t head = 0
    cdef engine_request* request = room_for_request(table, <uint32_t>sizeof(engine_request), &head)
    if request == NULL:
        return Status.NO_ROOM
    memset(request, 0, sizeof(engine_request))
    request.bytes, request.turn = <uint32_t>sizeof(engine_request), number
    store_release(&page.request_head, head)                 # pairs with requests_drain
    store_release(&page.arrivals, page.arrivals + 1)        # pairs with coordinator_step: a reason to look
    return Status.OK


cdef int announce_op(Table* table, Record* record, Op* op) noexcept nogil:
    """Announce that this rank is ready: by a request if the coordinator cannot know the metadata, and by the bit if the name has
    one. OK or NO_ROOM."""
    cdef rank_page* page = table.segment.mine
    cdef int32_t id = record.id
    cdef bint absent
    cdef int status
    if id >= 0 and op.agreed != record.defined and memcmp(&op.meta, &record.meta, sizeof(engine_meta)) == 0:
        op.agreed = record.defined
    if id < 0 or op.agreed != record.defined:
        status = write_request(table, record, op)
        if status != Status.OK:
            return status
    if id >= 0:
        absent = op.source == NULL and op.nbytes > 0
        if absent != bit(page.absent, id):
            flip_bit_relaxed(page.absent, id)
        if operation_of(&op.meta).says:
            store_relaxed(&page.rows[id], <uint64_t>op.rows)
        if load32_relaxed(&table.segment.coordinator.recording):
            store_relaxed(&page.brought[id], to_coordinator_time(table.segment, op.submitted))
        # Release: a rank that sees the bit sees rows, absent, the time, the request and the tensor itself.
        flip_bit_release(page.ready, id)
    if op.awaited:
        table_await(table, op, True)
    store_release(&page.arrivals, page.arrivals + 1)        # pairs with coordinator_step: a reason to look
    return Status.OK


cdef int table_submit(Table* table, Record* record, Op* op, uint64_t now) noexcept nogil:
    """Submit `op` under the name of `record`. `now`: the current time, or 0. On success the engine holds `op` until OP_DONE."""
    cdef int status
    if record.inflight != NULL:
        return Status.AFTER_FAILURE if fails(record.inflight) else Status.DUPLICATE
    op.record, op.status, op.requested = record, Status.OK, False
    op.submitted = now if now else now_ns()
    op.since = patience_at(table.clock, op.submitted)
    store_pointer(<void**>&record.inflight, op)            # before the bit: the entry may come at once
    status = announce_op(table, record, op)
    if status != Status.OK:
        store_pointer(<void**>&record.inflight, NULL)
        return status
    link_op(table, op)
    return Status.OK


cdef inline Op** list_of(Table* table, const Op* op) noexcept nogil:
    """Return the head of the list for an operation: failures or operations in flight."""
    return &table.failures if fails(op) else &table.inflight


cdef void link_op(Table* table, Op* op) noexcept nogil:
    """Insert an operation at the head of its list."""
    cdef Op** head = list_of(table, op)
    op.previous, op.next = NULL, head[0]
    if head[0] != NULL:
        head[0].previous = op
    store_pointer(<void**>head, op)
    table.inflight_count += not fails(op)


cdef void table_toggle(Table* table, int32_t id) noexcept nogil:
    """Toggle the bit of `id` to the phase that an entry has given it, on a rank that has submitted nothing."""
    flip_bit_release(table.segment.mine.ready, id)


cdef bint table_stand_in(Table* table, Record* record) noexcept nogil:
    """Submit, on a rank that has joined, an operation that changes nothing: an absent tensor, or no rows. False without
    memory."""
    cdef Op* op = <Op*>calloc(1, sizeof(Op))
    if op == NULL:
        return False
    op.record, op.flags, op.meta = record, OP_STAND_IN, record.meta
    op.submitted = now_ns()
    op.since = patience_at(table.clock, op.submitted)
    operation_of(&op.meta).stand_in(op, table.segment.size)
    store_pointer(<void**>&record.inflight, op)
    if not record.fresh:
        table_toggle(table, record.id)
    link_op(table, op)
    return True


cdef void table_dismiss(Op* op) noexcept nogil:
    """Free an operation that table_stand_in made, with what the entry added to it."""
    free(op.memory)
    free(op.row_counts)
    free(op.splits)
    free(op.members)
    free(op)


cdef void table_await(Table* table, Op* op, bint on) noexcept nogil:
    """Publish that a thread of this rank waits for `op`, or that none does any longer."""
    cdef rank_page* page = table.segment.mine
    cdef int32_t id = op.record.id
    op.awaited = on
    if id >= 0:
        if on != bit(page.awaited, id):
            flip_bit_relaxed(page.awaited, id)
    if on:
        if id < 0:
            store32_relaxed(&page.wait_requests, 1)
        store_release(&page.waits, page.waits + 1)          # pairs with the coordinator's acquire
    elif page.wait_requests:
        store32_relaxed(&page.wait_requests, 0)


cdef inline void clear_overdue(Table* table, int32_t id) noexcept nogil:
    """Clear the word `overdue` if it names `id`, under which nothing is in flight any more."""
    cdef rank_page* page = table.segment.mine
    if page.overdue >> 1 == <uint32_t>(id + 1) and page.overdue:
        store32_release(&page.overdue, 0)


cdef void table_finish(Table* table, Op* op, int status) noexcept nogil:
    """Remove `op` from its name, with `status`. The caller sets OP_DONE afterwards, as its last access to the operation."""
    cdef Record* record = op.record
    if op.awaited:
        table_await(table, op, False)
    op.status = status
    if op.previous != NULL:
        op.previous.next = op.next
    else:
        store_pointer(<void**>list_of(table, op), op.next)
    if op.next != NULL:
        op.next.previous = op.previous
    op.next, op.record = NULL, NULL         # the record may be freed now
    table.inflight_count -= not fails(op)
    store_pointer(<void**>&record.inflight, NULL)
    record.fresh = False
    record.times += 1
    if record.queued:
        store32_relaxed(&table.released, table.released + 1)
    clear_overdue(table, record.id)
    table_release(table, record)


cdef bint table_define(Table* table, int32_t id, const char* name, uint32_t name_bytes, const engine_meta* meta) noexcept nogil:
    """Execute a DEFINE entry: from now on `name` travels as bit `id`. False without memory, or if the id or the name has another
    partner."""
    cdef Record* record = table_record(table, name, name_bytes)
    cdef Op* op
    if record == NULL or (record.id >= 0 and record.id != id) or (table.by_id[id] != NULL and table.by_id[id] != record):
        return False
    record.meta = meta[0]
    record.defined += 1
    record.fresh = record.fresh or record.id < 0
    record.id = id
    table.by_id[id] = record
    op = record.inflight
    if op != NULL and op.awaited:
        table_await(table, op, True)
    return True


cdef int table_evict(Table* table, int32_t id) noexcept nogil:
    """Execute an EVICT entry: the id is about to get another name. An operation in flight under it is sent again as a request.
    OK, or NO_ROOM: try again."""
    cdef Record* record = table.by_id[id]
    cdef rank_page* page = table.segment.mine
    cdef Op* op
    if record == NULL:
        return Status.OK
    op = record.inflight
    if op != NULL and not load32_relaxed(&op.flags) & OP_TAKEN:     # a taken one was scheduled: it is only not done
        # An operation with changed metadata was sent as a request already: the coordinator reads that after it has forgotten the
        # id.
        if not op.requested and write_request(table, record, op) != Status.OK:
            return Status.NO_ROOM
        flip_bit_release(page.ready, id)        # taken back: the bit equals the phase again
        store_release(&page.arrivals, page.arrivals + 1)
    if bit(page.awaited, id):
        flip_bit_relaxed(page.awaited, id)
        store32_relaxed(&page.wait_requests, 1)
    clear_overdue(table, id)
    table.by_id[id] = NULL
    record.id = -1
    table_release(table, record)
    return Status.OK


cdef bint table_brought_by_all(Table* table, int32_t id) noexcept nogil:
    """Return whether every rank that this one sees, and that has not joined, has toggled the bit of `id` as often as this one.
    This rank's submission then completes the name. True without an id."""
    cdef bint mine
    cdef int r
    if id < 0:
        return True             # only the coordinator knows who has requested a name
    mine = bit(table.segment.mine.ready, id)
    for r in range(table.segment.size):
        if r != table.segment.rank and visible(table.segment, r) and not away(table.segment, r) and (
                bit(table.segment.pages[r].ready, id) != mine):
            return False
    return True
