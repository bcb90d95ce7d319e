"""Frozen batches: gradients on GPUs that travel together in every backward pass, or each alone.

What NCCL sums depends on what travels together. So time must not decide it: a batch is appended when all of its members are
ready. Else it is broken, and each of them travels alone. docs/architecture/protocol-frozen.md says who waits for whom. The caller
holds rank 0's driver role.
"""
from libc.stdint cimport int32_t
from libc.stdlib cimport calloc, free, malloc, qsort, realloc

from engine_ext.coordinator.coordinator cimport FrozenBatch, Optimizer, cycle_ns, is_frozen, open_queue, wire_now, withheld
from engine_ext.coordinator.fusion cimport append, are_compatible
from engine_ext.coordinator.lateness cimport observe_batch_closes
from engine_ext.operations.kinds cimport wire_bytes
from engine_ext.platform.atomics cimport load32_acquire, load_relaxed, now_ns
from engine_ext.platform.clock cimport after_ns, age_ns
from engine_ext.shared.counters cimport CLOSED_FROZEN
from engine_ext.shared.layout cimport BATCH_ITEMS, ENTRY_FROZEN, MAX_RANKS
from engine_ext.shared.segment cimport bit

cdef enum:
    PARTS = 8                   # usual number of batches of an optimizer; more where the fusion threshold is smaller
    LEAST_BYTES = 1 << 20       # least size of a batch, if the fusion threshold allows it: less is not worth a call of NCCL
    HOLD_NS = 1000000000        # a batch without a new member for so long is broken, if no rank waits
    LONGEST_HOLD_NS = 30000000000   # the same, if ranks wait for all that they have submitted
    LOOK_NS = 1000000           # least time between two looks at held batches, while nothing comes


# ---- what a batch is made of --------------------------------------------------------------------------------------------------

cdef int compare_places(const void* x, const void* y) noexcept nogil:
    cdef uint64_t a = (<const NameState**>x)[0].place, b = (<const NameState**>y)[0].place
    return (a > b) - (a < b)


cdef inline uint64_t bytes_now(const Coordinator* c, const NameState* name) noexcept nogil:
    """Return the bytes of a name as it would travel now."""
    return <uint64_t>wire_bytes(&name.meta, wire_now(c, &name.meta))


cdef void free_batch(FrozenBatch* batch) noexcept nogil:
    """Free a batch; its members have none afterwards."""
    cdef int32_t k
    for k in range(batch.count):
        batch.members[k].batch = NULL
    free(batch.members)
    free(batch)


cdef void free_batches(Optimizer* o) noexcept nogil:
    cdef FrozenBatch* batch
    while o.batches != NULL:
        batch = o.batches
        o.batches = batch.next
        free_batch(batch)
    o.frozen = 0


cdef NameState** of_round(const Coordinator* c, const Optimizer* o, int32_t* count) noexcept nogil:
    """Return the gradients that came in an optimizer's round, in the order in which rank 0 first submitted them. The caller frees
    the array. NULL without memory."""
    cdef NameState** found = <NameState**>malloc((<size_t>o.came + 1) * sizeof(NameState*))
    cdef NameState* name = o.names
    count[0] = 0
    if found == NULL:
        return NULL
    while name != NULL:
        if name.round == o.round and is_frozen(c, name):
            found[count[0]] = name
            count[0] += 1
        name = name.sibling
    qsort(found, <size_t>count[0], sizeof(NameState*), compare_places)
    return found


cdef FrozenBatch* make_batch(Coordinator* c, NameState** names, int32_t left, uint64_t limit) noexcept nogil:
    """Make a batch of the first of `names` (there are `left`), and of the later ones that fuse with it, up to the first that
    would make it larger than `limit`. Sets `batch` of its members. NULL without memory."""
    cdef FrozenBatch* batch = <FrozenBatch*>calloc(1, sizeof(FrozenBatch))
    cdef uint64_t nbytes = 0, more
    cdef NameState** fitting
    cdef int32_t k
    if batch != NULL:
        batch.members = <NameState**>malloc(<size_t>left * sizeof(NameState*))
    if batch == NULL or batch.members == NULL:
        free(batch)
        return NULL
    for k in range(left):
        if names[k].batch != NULL or (batch.count and not are_compatible(c, &names[0].meta, &names[k].meta)):
            continue
        more = bytes_now(c, names[k])
        if batch.count and (nbytes + more > limit or batch.count >= BATCH_ITEMS):
            break
        nbytes += more
        names[k].batch = batch
        batch.members[batch.count] = names[k]
        batch.count += 1
    fitting = <NameState**>realloc(batch.members, <size_t>batch.count * sizeof(NameState*))
    if fitting != NULL:
        batch.members = fitting
    return batch


cdef void make_batches(Coordinator* c, Optimizer* o) noexcept nogil:
    """Make an optimizer's batches anew, of the gradients that came in its round. Without memory it has none, and the next round
    tries again."""
    cdef int32_t count = 0, k
    cdef uint64_t nbytes = 0, limit
    cdef FrozenBatch* batch
    cdef FrozenBatch** last = &o.batches
    cdef NameState** names
    free_batches(o)
    o.stale, o.fusion_threshold, o.compression = True, c.knobs.fusion_threshold, c.knobs.compression
    names = of_round(c, o, &count)
    if names == NULL:
        return
    for k in range(count):
        nbytes += bytes_now(c, names[k])
    limit = min(c.knobs.fusion_threshold, max(nbytes // <uint64_t>PARTS, <uint64_t>LEAST_BYTES))
    for k in range(count):
        if names[k].batch == NULL:
            batch = make_batch(c, names + k, count - k, limit)
            if batch == NULL:
                free_batches(o)
                break
            last[0] = batch
            last = &batch.next
            o.frozen += batch.count
    else:
        o.stale = False
    free(names)


# ---- rounds -------------------------------------------------------------------------------------------------------------------

cdef Optimizer* optimizer_of(Coordinator* c, NameState* name) noexcept nogil:
    """Return the optimizer whose gradient a name is, and list the name there; NULL without memory."""
    cdef Optimizer* o = c.optimizers
    if name.optimizer != NULL:
        return name.optimizer
    while o != NULL and o.number != name.number:
        o = o.next
    if o == NULL:
        o = <Optimizer*>calloc(1, sizeof(Optimizer))
        if o == NULL:
            return NULL
        o.number, o.round, o.next, c.optimizers = name.number, 1, c.optimizers, o
    name.optimizer, name.sibling, o.names = o, o.names, name
    return o


cdef void drop_batch(Coordinator* c, FrozenBatch* batch) noexcept nogil:
    """Break a batch: its held members go to the open batch."""
    cdef NameState* name
    cdef int32_t k
    for k in range(batch.count):
        name = batch.members[k]
        if name.held:
            name.held = False
            c.held -= 1
            name.nbytes = bytes_now(c, name)        # compression may have changed since
            open_queue(c, name)
    batch.here, batch.broken = 0, True


cdef void begin_round(Coordinator* c, Optimizer* o) noexcept nogil:
    """Begin an optimizer's next round, because a gradient came that had come in this round. It has begun on every rank."""
    cdef FrozenBatch* batch = o.batches
    cdef bint kept = False
    while batch != NULL:
        if batch.here == batch.count:
            kept = True                 # the schedule was full: it travels as it is, and the batches are made anew another time
        elif batch.here:
            drop_batch(c, batch)
        batch = batch.next
    if not kept and (o.stale or o.came != o.frozen or o.fusion_threshold != c.knobs.fusion_threshold
                     or o.compression != c.knobs.compression):
        make_batches(c, o)
    batch = o.batches
    while batch != NULL:
        batch.broken = False
        batch = batch.next
    o.round += 1
    o.came = 0


cdef bint frozen_hold(Coordinator* c, NameState* name) noexcept nogil:
    """Hold a name that is ready on all ranks for the others of its batch. Return whether it is held."""
    cdef Optimizer* o
    cdef FrozenBatch* batch
    if not is_frozen(c, name):
        return False
    o = optimizer_of(c, name)
    if o == NULL:
        return False
    if name.round == o.round:
        begin_round(c, o)
    name.round = o.round
    o.came += 1
    batch = name.batch
    if batch == NULL:
        o.stale = True
        return False
    if batch.broken:
        return False
    batch.here += 1
    batch.latest = now_ns()
    name.held = True
    c.held += 1
    return True


cdef uint64_t longest_hold(uint64_t warning_ns, uint64_t limit_ns) noexcept nogil:
    """Return how long a batch is held for a late rank: half of the smaller of warning and limit (each 0 for never), at most
    LONGEST_HOLD_NS. After that its members travel, and a report names the gradient that the rank lacks."""
    cdef uint64_t longest = LONGEST_HOLD_NS
    if warning_ns:
        longest = min(longest, warning_ns // 2)
    return min(longest, limit_ns // 2) if limit_ns else longest


# ---- the end of a batch -------------------------------------------------------------------------------------------------------

cdef bint append_batch(Coordinator* c, FrozenBatch* batch) noexcept nogil:
    """Append a batch whose members are all ready. Members that no rank has move nothing, and go to the open batch. False: the
    schedule is full."""
    cdef NameState* name
    cdef uint64_t nbytes = 0
    cdef int32_t items = 0, k
    for k in range(batch.count):
        name = batch.members[k]
        if name.absent < c.segment.size:
            c.scratch[items] = name.id
            items += 1
            nbytes += bytes_now(c, name)
    if items and not append(c, c.scratch, items, nbytes, ENTRY_FROZEN):
        return False
    for k in range(batch.count):
        name = batch.members[k]
        name.held = False
        if name.absent == c.segment.size:
            open_queue(c, name)
    c.held -= batch.count
    batch.here = 0
    if items:
        observe_batch_closes(c, CLOSED_FROZEN)
    return True


cdef bint is_awaited(const Coordinator* c, const FrozenBatch* batch) noexcept nogil:
    """Return whether a thread of any rank waits for a held member."""
    cdef int32_t k
    cdef int r
    for k in range(batch.count):
        for r in range(c.segment.size if batch.members[k].held else 0):
            if bit(c.segment.pages[r].awaited, batch.members[k].id):
                return True
    return False


cdef struct Ended:              # ranks that have ended their backward pass: they wait for all that they have submitted
    int[MAX_RANKS] ranks
    int count


cdef void find_ended(const Coordinator* c, Ended* ended) noexcept nogil:
    """Find the ranks that have ended their pass."""
    cdef int r
    ended.count = 0
    for r in range(c.segment.size if c.held else 0):
        if load32_acquire(&c.segment.pages[r].wait_all):        # pairs with driver_wait_for_all: read before the bits
            ended.ranks[ended.count] = r
            ended.count += 1


cdef bint cannot_fill(Coordinator* c, const FrozenBatch* batch, const Ended* ended) noexcept nogil:
    """Return whether a rank that has ended its pass has not submitted a member, and so will not in this pass. A member that was
    scheduled in this pass without its batch, which was made meanwhile, counts likewise."""
    cdef int32_t k
    cdef int i
    # A held member was submitted in this pass, so these are no waits of an earlier pass.
    for k in range(batch.count if ended.count else 0):
        for i in range(0 if batch.members[k].held else ended.count):
            if withheld(c, batch.members[k], ended.ranks[i]):
                return True
    return False


cdef bint anything_awaited(const Coordinator* c) noexcept nogil:
    """Return whether a thread of any rank waits for a name that is ready on all ranks and not scheduled."""
    cdef int32_t w
    cdef int r
    for r in range(c.segment.size):
        for w in range(c.words):
            if c.queued[w] & load_relaxed(&c.segment.pages[r].awaited[w]):
                return True
    return False


cdef bint is_over(Coordinator* c, const FrozenBatch* batch, uint64_t now, const Ended* ended, bint awaited) noexcept nogil:
    """Return whether a batch with some members ready is to be broken. `awaited`: a thread waits for some held or queued name."""
    if awaited and is_awaited(c, batch):
        return True
    if cannot_fill(c, batch, ended):
        return True
    return age_ns(now, batch.latest) >= (c.hold_ns if ended.count else min(c.hold_ns, <uint64_t>HOLD_NS))


cdef bint frozen_close(Coordinator* c, bint changed) noexcept nogil:
    """Append the batches that are complete, and break those that are not to be held any longer. `changed`: ranks have submitted
    something, or begun to wait, since the last look. False: the schedule is full and something is left."""
    cdef uint64_t now = now_ns()
    cdef bint awaited = changed and anything_awaited(c), room = True, turned
    cdef Optimizer* o = c.optimizers
    cdef FrozenBatch* batch
    cdef Ended ended
    find_ended(c, &ended)
    while o != NULL:
        batch = o.batches
        turned = o.compression != c.knobs.compression       # tensors that fused may not do so any more
        while batch != NULL:
            if batch.here == batch.count and not turned:
                room = room and append_batch(c, batch)
            elif batch.here and (turned or is_over(c, batch, now, &ended, awaited)):
                drop_batch(c, batch)
            batch = batch.next
        o = o.next
    c.looked = now
    return room


cdef uint64_t frozen_deadline(const Coordinator* c) noexcept nogil:
    """Return when held batches have to be looked at again: nanoseconds, monotonic; 0: none is held."""
    return after_ns(c.looked, max(cycle_ns(c), <uint64_t>LOOK_NS)) if c.held else 0


# ---- names that change, or go -------------------------------------------------------------------------------------------------

cdef void frozen_dissolve(Coordinator* c, NameState* name) noexcept nogil:
    """Remove the batch of a name whose metadata changes; others are made when the round ends."""
    cdef FrozenBatch* batch = name.batch
    cdef FrozenBatch** link
    if batch == NULL:
        return
    link = &name.optimizer.batches
    while link[0] != batch:
        link = &link[0].next
    link[0] = batch.next
    drop_batch(c, batch)
    name.optimizer.frozen -= batch.count
    name.optimizer.stale = True
    free_batch(batch)


cdef void frozen_forget(Coordinator* c, NameState* name) noexcept nogil:
    """Remove a name that is about to be freed from its optimizer."""
    cdef NameState** link
    if name.optimizer == NULL:
        return
    frozen_dissolve(c, name)
    link = &name.optimizer.names
    while link[0] != name:
        link = &link[0].sibling
    link[0] = name.sibling
    name.optimizer = NULL


cdef void frozen_free(Coordinator* c) noexcept nogil:
    """Free all optimizers and batches."""
    cdef Optimizer* o
    while c.optimizers != NULL:
        o = c.optimizers
        c.optimizers = o.next
        free_batches(o)
        free(o)
