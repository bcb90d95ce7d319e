"""Fusion: when the open batch closes, and which tensors travel in one entry.

A batch never mixes tensors that one pass cannot reduce: kind, dtype, compression, operation, root, scales, shared or private must
be equal. Where compression is tuned, tensors travel by the knob in force when their entry is appended. Tensors that no rank has
are listed in a SKIP entry and move no data. Gradients on GPUs have batches of their own (frozen.pyx).
"""
from libc.stdint cimport int64_t, uint8_t
from libc.string cimport memcpy, memset

from engine_ext.coordinator.coordinator cimport NameState, cycle_ns, is_frozen, stamp, time_of_step, waiting, wire_now
from engine_ext.coordinator.lateness cimport observe_append, observe_batch_closes, observed_words
from engine_ext.coordinator.mismatch cimport bringer
from engine_ext.coordinator.stores cimport stores_choose
from engine_ext.operations.kinds cimport operation_of
from engine_ext.operations.operation cimport SAYS_ROWS, Operation, has_one_dtype, is_coded_whole, whole_chunk
from engine_ext.platform.atomics cimport load32_relaxed, load_relaxed
from engine_ext.platform.clock cimport age_ns
from engine_ext.shared.counters cimport CLOSED_AWAITED, CLOSED_CYCLE_TIME, CLOSED_FULL, CLOSED_WHOLE_STEP
from engine_ext.shared.layout cimport (
    ALGORITHM_BLOCKS, ALGORITHM_DEVICE, ALGORITHM_ONE_SHOT, ALGORITHM_SHARED, ALGORITHM_TWO_SHOT, BATCH_ITEMS, CAUSE_RAISED,
    ENTRY_ALIGN, ENTRY_BATCH, ENTRY_MEMBERS, ENTRY_NEEDS_PACK, ENTRY_SKIP, KINDS, SLOT_BYTES, STORES_AUTO, STORES_CACHED,
    WIRE_FP8, engine_entry, entry_ids, entry_rows, rank_page,
)
from engine_ext.shared.segment cimport abort_world, clear_bit, flip_bit, schedule_append, schedule_reserve

cdef const char* TOO_MANY_UNNAMED = b"it has reported a number of unnamed operations that it cannot have submitted"


cdef bint somebody_waits(Coordinator* c) noexcept nogil:
    """Return whether a thread of any rank waits for a member of the open batch, or for all of its rank's operations while each of
    those is in the batch."""
    cdef rank_page* page
    cdef NameState* name
    cdef uint64_t outstanding
    cdef int32_t w
    cdef int r
    for r in range(c.segment.size):
        page = c.segment.pages[r]
        if load32_relaxed(&page.wait_requests):
            return True         # for a name without a bit: it may be any of the batch
        for w in range(c.words):
            if c.queued[w] & load_relaxed(&page.awaited[w]):
                return True
        if load32_relaxed(&page.wait_all):
            outstanding = 0
            for w in range(c.words):
                outstanding |= (load_relaxed(&page.ready[w]) ^ c.phase[w]) & c.defined[w] & ~c.queued[w]
            name = c.open
            while name != NULL and outstanding == 0:
                outstanding = name.requests[r] != NULL
                name = name.next
            if outstanding == 0:
                return True
    return False


cdef int find_close_reason(Coordinator* c) noexcept nogil:
    """Return why the open batch closes now: one of CLOSED_*, or -1: it does not."""
    if c.queue_bytes >= c.knobs.fusion_threshold or c.queue_count >= BATCH_ITEMS:
        return CLOSED_FULL
    if c.step_items < c.usual_items <= c.step_items + <uint64_t>waiting(c):
        return CLOSED_WHOLE_STEP
    if somebody_waits(c):
        return CLOSED_AWAITED
    return CLOSED_CYCLE_TIME if age_ns(time_of_step(c), c.queue_since) >= cycle_ns(c) else -1


cdef inline bint in_place(Coordinator* c, const engine_meta* meta) noexcept nogil:
    """Return whether a tensor is reduced in place, in the arena that the ranks share. A compressed tensor must travel."""
    return meta.shared >= 0 and wire_now(c, meta) == 0 and c.segment.hosts == 1


cdef bint can_fuse(Coordinator* c, const NameState* a, const NameState* b) noexcept nogil:
    """Return whether `b` may travel in an entry that `a` opened."""
    cdef const engine_meta* x = &a.meta
    cdef const engine_meta* y = &b.meta
    if x.kind != y.kind or operation_of(x).alone or (a.absent == c.segment.size) != (b.absent == c.segment.size):
        return False
    if a.absent < c.segment.size and (is_frozen(c, a) or is_frozen(c, b)):
        return False            # a gradient on a GPU outside its frozen batch travels alone
    return are_compatible(c, x, y)


cdef bint choose_alike(Coordinator* c, const engine_meta* x, const engine_meta* y) noexcept nogil:
    """Return whether the algorithm that is chosen for one of two descriptions can carry the other. A group goes by its first
    tensor's dtype; its other tensors may have dtypes that cannot be coded, or that a carrier cannot sum with that one."""
    if wire_now(c, x) == WIRE_FP8 and is_coded_whole(x) != is_coded_whole(y):
        return False
    return not c.segment.crews.summing or has_one_dtype(x) == has_one_dtype(y)


cdef bint are_compatible(Coordinator* c, const engine_meta* x, const engine_meta* y) noexcept nogil:
    """Return whether one pass can reduce, or one call move, tensors of two descriptions of the same kind."""
    return (x.dtype == y.dtype and x.device == y.device and wire_now(c, x) == wire_now(c, y) and x.op == y.op and x.root == y.root
            and x.prescale == y.prescale and x.postscale == y.postscale and in_place(c, x) == in_place(c, y)
            and choose_alike(c, x, y)) or not operation_of(x).moves


cdef void align_unnamed(Coordinator* c, engine_entry* entry) noexcept nogil:
    """Write on a barrier's entry, for each kind, the largest number of unnamed operations that a rank has submitted. The numbers
    stand still: the ranks' only threads wait in the barrier. A number that no rank can have ends the world."""
    cdef uint64_t[KINDS] most
    cdef uint64_t number
    cdef int r, kind
    memset(most, 0, sizeof(most))
    for kind in range(KINDS):
        for r in range(c.segment.size):
            number = load_relaxed(&c.segment.pages[r].unnamed[kind])
            if number > load_relaxed(&c.segment.mine.unnamed[kind]) + MOST_LEFT_OUT:
                abort_world(c.segment, r, CAUSE_RAISED, TOO_MANY_UNNAMED)
                return
            most[kind] = max(most[kind], number)
    entry.flags |= ENTRY_ALIGN
    for kind in range(KINDS):
        entry.meta.dims[kind] = <int64_t>most[kind]


cdef uint8_t stores_of(Coordinator* c, const engine_entry* entry) noexcept nogil:
    """Return the kind of store for an entry. Measurements choose for two-shot entries; other algorithms use cached stores unless
    the knob says otherwise."""
    if entry.algorithm in (ALGORITHM_ONE_SHOT, ALGORITHM_SHARED, ALGORITHM_DEVICE, ALGORITHM_BLOCKS):
        return STORES_CACHED
    if c.knobs.stores != STORES_AUTO:
        return c.knobs.stores
    if entry.algorithm != ALGORITHM_TWO_SHOT:
        return STORES_CACHED
    return stores_choose(&c.choosers[entry.meta.wire != 0], entry.bytes)


cdef bint append(Coordinator* c, const int32_t* ids, int32_t items, uint64_t nbytes, uint32_t flags) noexcept nogil:
    """Append one entry with `flags` for `ids`, which fuse. False: the schedule is full."""
    cdef NameState* name = c.by_id[ids[0]]
    cdef const Operation* operation = operation_of(&name.meta)
    cdef uint32_t id_words = <uint32_t>(items + 1) // 2
    cdef uint32_t row_words = <uint32_t>c.segment.size if operation.says == SAYS_ROWS else 0
    cdef uint32_t observed = observed_words(name, items)
    cdef engine_entry* entry = schedule_reserve(
        &c.writer, <uint32_t>sizeof(engine_entry) // 8 + id_words + row_words + observed)
    cdef int32_t i
    if entry == NULL:
        return False
    entry.type = ENTRY_SKIP if name.absent == c.segment.size else ENTRY_BATCH
    entry.kind, entry.items, entry.bytes, entry.meta = name.meta.kind, <uint32_t>items, nbytes, name.meta
    entry.flags = flags
    entry.meta.wire = wire_now(c, &name.meta)
    if not in_place(c, &name.meta):
        entry.meta.shared = -1
    memcpy(<void*>entry_ids(entry), ids, <size_t>items * sizeof(int32_t))
    if row_words:
        memcpy(<void*>entry_rows(entry), name.rows, row_words * sizeof(int64_t))
    if entry.meta.device:
        entry.algorithm, entry.chunk = ALGORITHM_DEVICE, SLOT_BYTES     # SLOT_BYTES is the chunk of the exchange before it
    else:
        operation.choose(entry, &c.knobs, &c.segment.crews)
        entry.chunk = whole_chunk(entry.chunk)
    entry.stores = stores_of(c, entry)
    for i in range(items):
        name = c.by_id[ids[i]]
        if name.absent:
            entry.flags |= ENTRY_NEEDS_PACK
        if name.meta.group and c.joined_count and (operation.tells_members or entry.meta.wire == WIRE_FP8):
            entry.flags |= ENTRY_MEMBERS
            entry.id = bringer(c)
        if name.aligns:
            align_unnamed(c, entry)
        name.used = c.writer.sequence
        flip_bit(c.phase, ids[i])
        clear_bit(c.queued, ids[i])
    observe_append(c, entry, ids, observed)
    c.step_items += <uint64_t>items
    stamp(c, entry)
    schedule_append(&c.writer, entry)
    return True


cdef bint close_batches(Coordinator* c) noexcept nogil:
    """Append the open batch if it is due: one entry for each set of tensors that fuse, none above the fusion threshold.

    False: the schedule is full and something that is due is left.
    """
    cdef int32_t i, kept, items
    cdef uint64_t nbytes
    cdef NameState* first
    cdef NameState* name
    cdef int reason = find_close_reason(c)
    if reason < 0:
        return True
    while c.queue_count:
        first = c.by_id[c.queue[0]]
        kept = items = 0
        nbytes = 0
        # Members of the entry go to the front of the queue, the others to `scratch`; both keep their order.
        for i in range(c.queue_count):
            name = c.by_id[c.queue[i]]
            if items == 0 or (can_fuse(c, first, name) and items < BATCH_ITEMS
                              and nbytes + name.nbytes <= c.knobs.fusion_threshold):
                c.queue[items] = c.queue[i]
                items += 1
                nbytes += name.nbytes
            else:
                c.scratch[kept] = c.queue[i]
                kept += 1
        if not append(c, c.queue, items, nbytes, 0):
            memcpy(c.queue + items, c.scratch, <size_t>kept * sizeof(int32_t))
            return False
        c.queue_bytes -= nbytes
        memcpy(c.queue, c.scratch, <size_t>kept * sizeof(int32_t))
        c.queue_count = kept
    observe_batch_closes(c, reason)
    return True
