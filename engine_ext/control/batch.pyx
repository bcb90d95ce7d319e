"""Fusion: when the open batch closes, and which tensors travel in one entry.

A batch never mixes what cannot be reduced by one pass: kind, dtype, compression, operation, root, scales, shared or private.
Where compression is tuned, the knob that is in force when an entry is appended is what its tensors travel as.
Tensors that no rank brought are told so in a SKIP entry and move no data.
"""
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.string cimport memcpy

from engine_ext.control.agreement cimport bringer
from engine_ext.control.arrivals cimport arrivals_append, arrivals_count
from engine_ext.control.coordinator cimport Coordinator, Name, cycle_ns, stamp, wire_now
from engine_ext.control.stores cimport StoreChooser, stores_choose
from engine_ext.kernels.kernels cimport ENGINE_ADASUM
from engine_ext.platform.atomics cimport load32_relaxed, load_relaxed, now_ns
from engine_ext.platform.clock cimport age_ns
from engine_ext.shared.counters cimport CLOSED_AWAITED, CLOSED_CYCLE_TIME, CLOSED_FULL, CLOSED_WHOLE_STEP, tally
from engine_ext.shared.layout cimport (
    ALGORITHM_ADASUM, ALGORITHM_ONE_SHOT, ALGORITHM_SCATTER, ALGORITHM_SHARED, ALGORITHM_TWO_SHOT, BATCH_ITEMS, ENTRY_ALIGN,
    ENTRY_BATCH, ENTRY_MEMBERS, ENTRY_NEEDS_PACK, ENTRY_SKIP, KIND_ALLGATHER, KIND_ALLREDUCE, KIND_ALLTOALL, KIND_BARRIER,
    KIND_REDUCESCATTER, KINDS, SLOT_BYTES, STORES_AUTO, STORES_CACHED, engine_entry, engine_meta, rank_page,
)
from engine_ext.shared.schedule cimport schedule_append, schedule_reserve

cdef enum:
    ONE_SHOT_BYTES = 32768      # of all ranks together: below it a second handshake costs more than the extra reading
    SMALLEST_CHUNK = 65536

cdef bint somebody_waits(Coordinator* c) noexcept nogil:
    """Whether a thread of any rank waits for a member of the open batch, or for nothing that is not in it."""
    cdef rank_page* page
    cdef Name* name
    cdef uint64_t outstanding
    cdef int32_t w
    cdef int r
    for r in range(c.segment.size):
        page = c.segment.pages[r]
        if load32_relaxed(&page.wait_requests):
            return True         # for a name that has no bit yet: it may be any of them
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


cdef int due(Coordinator* c) noexcept nogil:
    """Why the open batch closes now: one of CLOSED_*, or -1: it does not."""
    if c.queue_bytes >= c.knobs.fusion_threshold or c.queue_count >= BATCH_ITEMS:
        return CLOSED_FULL
    if c.step_items < c.usual_items <= c.step_items + <uint64_t>c.queue_count:
        return CLOSED_WHOLE_STEP
    if somebody_waits(c):
        return CLOSED_AWAITED
    return CLOSED_CYCLE_TIME if age_ns(now_ns(), c.queue_since) >= cycle_ns(c) else -1


cdef inline bint travels_alone(const engine_meta* meta) noexcept nogil:
    return meta.kind == KIND_ALLGATHER or meta.kind == KIND_ALLTOALL or meta.kind == KIND_REDUCESCATTER


cdef inline bint in_place(Coordinator* c, const engine_meta* meta) noexcept nogil:
    """Whether a tensor is reduced where the ranks share it. What is compressed must travel."""
    return meta.shared >= 0 and wire_now(c, meta) == 0


cdef bint fuses(Coordinator* c, const Name* a, const Name* b) noexcept nogil:
    """Whether `b` may travel in an entry that `a` opened."""
    cdef const engine_meta* x = &a.meta
    cdef const engine_meta* y = &b.meta
    if x.kind != y.kind or travels_alone(x) or (a.absent == c.segment.size) != (b.absent == c.segment.size):
        return False
    return (x.dtype == y.dtype and wire_now(c, x) == wire_now(c, y) and x.op == y.op and x.root == y.root
            and x.prescale == y.prescale and x.postscale == y.postscale and in_place(c, x) == in_place(c, y)
            ) or x.kind == KIND_BARRIER


cdef void align(Coordinator* c, engine_entry* entry) noexcept nogil:
    """Tell on a barrier's entry how many operations without a name, of each kind, the rank with the most of them has brought.
    The ranks' only threads wait in the barrier, so the numbers stand still."""
    cdef int r, kind
    entry.flags |= ENTRY_ALIGN
    for kind in range(KINDS):
        entry.meta.dims[kind] = 0
        for r in range(c.segment.size):
            entry.meta.dims[kind] = max(entry.meta.dims[kind], <int64_t>load_relaxed(&c.segment.pages[r].unnamed[kind]))


cdef bint append(Coordinator* c, const int32_t* ids, int32_t items, uint64_t nbytes) noexcept nogil:
    """One entry for `ids`, which fuse. False: the schedule is full."""
    cdef Name* name = c.by_id[ids[0]]
    cdef bint gathers = name.meta.kind == KIND_ALLGATHER
    cdef bint adasum = name.meta.kind == KIND_ALLREDUCE and name.meta.op == ENGINE_ADASUM
    cdef uint32_t id_words = <uint32_t>(items + 1) // 2
    cdef uint32_t words = <uint32_t>sizeof(engine_entry) // 8 + id_words + (<uint32_t>c.segment.size if gathers else 0)
    cdef uint32_t recorded = <uint32_t>items if name.ready else 0
    cdef engine_entry* entry = schedule_reserve(&c.writer, words + recorded)
    cdef StoreChooser* chooser
    cdef char* body
    cdef int32_t i
    if entry == NULL:
        return False
    entry.type = ENTRY_SKIP if name.meta.kind == KIND_ALLREDUCE and name.absent == c.segment.size else ENTRY_BATCH
    entry.kind, entry.items, entry.bytes, entry.meta = name.meta.kind, <uint32_t>items, nbytes, name.meta
    entry.meta.wire = wire_now(c, &name.meta)
    if not in_place(c, &name.meta):
        entry.meta.shared = -1
    body = <char*>entry + sizeof(engine_entry)
    memcpy(body, ids, <size_t>items * sizeof(int32_t))
    if gathers:
        memcpy(body + id_words * 8, name.rows, <size_t>c.segment.size * sizeof(int64_t))
    if adasum or name.meta.kind == KIND_ALLTOALL or name.meta.kind == KIND_REDUCESCATTER:
        entry.algorithm = ALGORITHM_ADASUM if adasum else ALGORITHM_SCATTER
        entry.chunk = max(<uint32_t>SMALLEST_CHUNK, min(c.knobs.chunk_bytes, <uint32_t>SLOT_BYTES))
        entry.stores = STORES_CACHED if c.knobs.stores == STORES_AUTO else c.knobs.stores
    elif entry.meta.shared >= 0 and name.meta.kind == KIND_ALLREDUCE:
        entry.algorithm = ALGORITHM_SHARED
    elif name.meta.kind == KIND_ALLREDUCE and nbytes * <uint64_t>c.segment.size <= ONE_SHOT_BYTES:
        entry.algorithm, entry.chunk = ALGORITHM_ONE_SHOT, SLOT_BYTES
    else:
        chooser = &c.choosers[entry.meta.wire != 0]
        entry.algorithm = ALGORITHM_TWO_SHOT
        entry.chunk = max(<uint32_t>SMALLEST_CHUNK, min(c.knobs.chunk_bytes, <uint32_t>min(nbytes // 2, <uint64_t>SLOT_BYTES)))
        entry.chunk = (entry.chunk + 4095) & ~<uint32_t>4095
        entry.stores = stores_choose(chooser, nbytes) if c.knobs.stores == STORES_AUTO else c.knobs.stores
    for i in range(items):
        name = c.by_id[ids[i]]
        if name.absent:
            entry.flags |= ENTRY_NEEDS_PACK
        if name.meta.group and c.joined_count and (adasum or name.meta.kind == KIND_REDUCESCATTER):
            entry.flags |= ENTRY_MEMBERS
            entry.id = bringer(c)
        if name.aligns:
            align(c, entry)
        name.used = c.writer.sequence
        c.phase[ids[i] >> 6] ^= <uint64_t>1 << (ids[i] & 63)
        c.queued[ids[i] >> 6] &= ~(<uint64_t>1 << (ids[i] & 63))
    if recorded:
        arrivals_append(c, entry, ids)
    if c.page != NULL and entry.type == ENTRY_BATCH:
        arrivals_count(c, entry, name)
    c.queue_bytes -= nbytes
    c.step_items += <uint64_t>items
    stamp(c, entry)
    schedule_append(&c.writer, entry)
    return True


cdef bint close_batches(Coordinator* c) noexcept nogil:
    """If the open batch is due, append it, as one entry for each set that fuses, none above the fusion threshold.

    False: the schedule is full and something that is due is left.
    """
    cdef int32_t i, kept, items
    cdef uint64_t nbytes
    cdef Name* first
    cdef Name* name
    cdef int reason = due(c)
    if reason < 0:
        return True
    while c.queue_count:
        first = c.by_id[c.queue[0]]
        kept = items = 0
        nbytes = 0
        # Members to the front of the queue, the others to `rest`; both keep their order.
        for i in range(c.queue_count):
            name = c.by_id[c.queue[i]]
            if items == 0 or (fuses(c, first, name) and items < BATCH_ITEMS
                              and nbytes + name.nbytes <= c.knobs.fusion_threshold):
                c.queue[items] = c.queue[i]
                items += 1
                nbytes += name.nbytes
            else:
                c.rest[kept] = c.queue[i]
                kept += 1
        if not append(c, c.queue, items, nbytes):
            memcpy(c.queue + items, c.rest, <size_t>kept * sizeof(int32_t))
            return False
        memcpy(c.queue, c.rest, <size_t>kept * sizeof(int32_t))
        c.queue_count = kept
    if c.page != NULL:
        tally(&c.page.cycles[reason], 1)
    return True
