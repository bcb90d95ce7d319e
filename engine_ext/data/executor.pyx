"""The data plane's state machine (docs/architecture/protocol-memory.md).

Chunk numbers count over the whole schedule. So the words `packed`, `reduced` and `copied` of a rank say how many chunks it has
passed at each stage, whatever the entry. Chunks pass even a stage that has nothing to do.
"""
from libc.stdint cimport UINT64_MAX
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memcpy, memset

from engine_ext.kernels.kernels cimport (
    ENGINE_ADASUM, ENGINE_AVERAGE, ENGINE_MIN, ENGINE_NO_SOURCE, ENGINE_PRODUCT, ENGINE_SUM, dtype_bytes,
)
from engine_ext.platform.atomics cimport now_ns, store_relaxed
from engine_ext.platform.clock cimport age_ns, patience_at
from engine_ext.shared.layout cimport SLOTS, Status


cdef enum:
    STEPS_AT_ONCE = 16      # most steps of one call; then the driver looks for other work


cdef int executor_open(Executor* x, int rank, const Crews* crews, Transport* transport, Arena* arena,
                       const engine_kernels* kernels, const patience* clock) noexcept nogil:
    """Initialize an executor; return a Status. The pointers stay the caller's. executor_close frees it, also after a failure."""
    cdef int size = crews.size
    memset(x, 0, sizeof(Executor))
    x.rank, x.size, x.crews, x.transport, x.arena, x.kernels, x.clock = rank, size, crews, transport, arena, kernels, clock
    store_relaxed(&x.progressed, patience_at(clock, now_ns()))
    x.slots = <char**>calloc(size, sizeof(char*))
    x.sources = <const void**>calloc(size, sizeof(void*))
    x.targets = <void**>calloc(size, sizeof(void*))
    x.gather_bytes = <uint64_t*>calloc(size, 8)
    x.gather_start = <uint64_t*>calloc(size, 8)
    x.send_bytes = <uint64_t*>calloc(size, 8)
    x.send_start = <uint64_t*>calloc(size, 8)
    if (x.slots == NULL or x.sources == NULL or x.targets == NULL or x.gather_bytes == NULL or x.gather_start == NULL
            or x.send_bytes == NULL or x.send_start == NULL):
        return Status.NO_MEMORY
    return Status.OK


cdef void executor_close(Executor* x) noexcept nogil:
    plan_free(&x.plan)
    free(x.slots)
    free(<void*>x.sources)
    free(x.targets)
    free(x.gather_bytes)
    free(x.gather_start)
    free(x.send_bytes)
    free(x.send_start)
    if x.received != x.given:
        free(x.received)
    free(x.adasum.memory)
    memset(x, 0, sizeof(Executor))


cdef void executor_start(Executor* x, const Steps* steps, uint64_t chunks) noexcept nogil:
    """Begin the entry that the fields and the plan describe."""
    x.steps = steps
    x.first = x.passed.packed
    x.end = x.first + chunks
    x.uncopied = x.end if steps.copy == NULL else 0
    x.pack_gate = x.reduce_gate = 0
    x.reduce_lag = SLOTS            # no restriction: step() packs no chunk earlier than that either
    x.sums = x.takes_nothing = False
    x.culprit = -1
    x.active = True
    store_relaxed(&x.progressed, patience_at(x.clock, x.begun))
    if x.timed:
        memset(x.stage_first, 0, sizeof(x.stage_first))
        memset(x.stage_last, 0, sizeof(x.stage_last))
        memset(x.stage_spent, 0, sizeof(x.stage_spent))


cdef inline bint may_pack(const Executor* x) noexcept nogil:
    return x.passed.packed < x.end and (x.passed.packed < x.pack_gate or x.passed.reduced >= x.pack_gate)


cdef inline bint may_reduce(const Executor* x) noexcept nogil:
    return (x.passed.reduced < x.passed.packed and x.passed.reduced < x.passed.copied + x.reduce_lag
            and (x.passed.reduced < x.reduce_gate or x.passed.copied >= x.reduce_gate))


cdef void executor_needs(Executor* x) noexcept nogil:
    """Tell the transport the progress of other ranks at which step() can do something: the reverse of its conditions."""
    cdef bint needs_packed = not x.sums and not x.takes_nothing and (not x.steps.in_place or x.needs_pack)
    cdef Progress others
    others.packed = x.passed.reduced + 1 if may_reduce(x) and needs_packed else UINT64_MAX
    others.reduced = x.passed.copied + 1 if x.passed.copied < x.passed.reduced else UINT64_MAX
    others.copied = x.passed.packed + 1 - SLOTS if may_pack(x) and x.passed.packed >= SLOTS else UINT64_MAX
    x.transport.needs(x.transport, &others)


cdef void pass_chunk(Executor* x, Stage stage, uint64_t chunk) noexcept nogil:
    """Take one chunk of the entry through one stage."""
    cdef uint64_t begun = now_ns() if x.timed else 0
    if stage == Stage.PACKED:
        x.steps.pack(x, chunk)
    elif stage == Stage.REDUCED:
        x.steps.reduce(x, chunk)
    else:
        x.steps.copy(x, chunk)
    if x.transport.offer != NULL and x.steps.offer != NULL:
        x.steps.offer(x, stage, chunk)
    if x.timed:
        if x.stage_first[<int>stage] == 0:
            x.stage_first[<int>stage] = begun
        x.stage_last[<int>stage] = now_ns()
        x.stage_spent[<int>stage] += age_ns(x.stage_last[<int>stage], begun)


cdef inline bint all_ranks_reached(Executor* x, Stage stage, uint64_t chunks) noexcept nogil:
    """Return whether every rank, this one included, has passed `stage` for `chunks` chunks."""
    return x.transport.all_ranks_reached(x.transport, stage, chunks)


cdef inline bint may_take(Executor* x) noexcept nogil:
    """Return whether the input of the next chunk's reduction is complete."""
    if x.sums:
        return x.transport.summed(x.transport)
    return x.takes_nothing or (x.steps.in_place and not x.needs_pack) or all_ranks_reached(x, Stage.PACKED, x.passed.reduced + 1)


cdef bint step(Executor* x) noexcept nogil:
    """Take one chunk through one stage, if any can. Later stages come first, so that few chunks are in flight at once."""
    if x.passed.copied < x.passed.reduced:
        if not x.steps.copies_results or all_ranks_reached(x, Stage.REDUCED, x.passed.copied + 1):
            pass_chunk(x, Stage.COPIED, x.passed.copied - x.first)
            x.passed.copied += 1
            return True
    if may_reduce(x):
        if may_take(x):
            if x.steps.reduce != NULL:
                pass_chunk(x, Stage.REDUCED, x.passed.reduced - x.first)
            if x.passed.reduced < x.uncopied:
                x.passed.copied += 1
            x.passed.reduced += 1
            return True
    if may_pack(x):
        if x.steps.in_place or x.passed.packed < SLOTS or all_ranks_reached(x, Stage.COPIED, x.passed.packed + 1 - SLOTS):
            pass_chunk(x, Stage.PACKED, x.passed.packed - x.first)
            x.passed.packed += 1
            return True
    return False


cdef bint executor_progress(Executor* x) noexcept nogil:
    """Take at most STEPS_AT_ONCE steps that are possible now, which last about a millisecond; return whether there were any.
    Clears `active` when the entry is done on this rank."""
    cdef bint moved = False
    cdef int steps = 0
    x.waits = False
    while x.active and steps < STEPS_AT_ONCE:
        if x.passed.copied == x.end:
            x.active = False
            break
        if not step(x):
            x.waits = True
            break
        x.transport.publish(x.transport, &x.passed)
        steps += 1
        moved = True
    if moved and (x.active or x.end - x.first > 1):         # else the entry ended before a lack of progress could be noticed
        store_relaxed(&x.progressed, patience_at(x.clock, now_ns()))
    return moved


cdef int executor_laggard(Executor* x, bint elsewhere) noexcept nogil:
    """Return the other rank that has passed least of the entry in progress, as far as known here; -1: there is no other rank.
    Of equal ranks it is the lowest; with `elsewhere`, one of another host is preferred."""
    cdef Progress passed
    cdef uint64_t total, least = 0
    cdef int here = x.crews.host_of[x.rank], slowest = -1, r
    for r in range(x.size):
        if r == x.rank:
            continue
        passed = x.transport.progress(x.transport, r)
        total = passed.packed + passed.reduced + passed.copied
        if slowest < 0 or total < least or (
                elsewhere and total == least and x.crews.host_of[slowest] == here and x.crews.host_of[r] != here):
            slowest, least = r, total
    return slowest


cdef bint executor_passed_by(Executor* x, int rank) noexcept nogil:
    """Return whether `rank` is done with the entry in progress."""
    return x.transport.progress(x.transport, rank).copied >= x.end


# ---- pieces -----------------------------------------------------------------------------------------------------------------

# These functions handle the fusion plan's pieces in a chunk. `n` counts from the entry's first chunk; [low, high) is a range of
# the logical buffer.
#
# Slots are shared memory; tensors are this rank's own. One rank reduces an element, and adds all values in rank order (I7).

cdef void pack_range(Executor* x, char* into, uint64_t begin, uint64_t low, uint64_t high) noexcept nogil:
    """Copy [low, high) from the tensors to the slot `into`, which holds it from `begin` on; scale and cast on the way."""
    cdef Cut cut = cut_range(&x.plan, low, high)
    while next_piece(&x.plan, &cut):
        if cut.piece.source == NULL:
            fill_identity(into + (cut.low - begin), cut.piece.wire, x.reduction.op, elements(x, cut.piece, cut.high - cut.low))
        else:
            x.kernels.pack(cut.piece.wire, cut.piece.dtype, x.reduction.prescale, x.streaming, into + (cut.low - begin),
                           cut.piece.source + offset(x, cut.piece, cut.low), elements(x, cut.piece, cut.high - cut.low))


cdef void copy_range(Executor* x, const char* out, uint64_t begin, uint64_t low, uint64_t high) noexcept nogil:
    """Copy [low, high) from the slot `out`, which holds it from `begin` on, to the tensors."""
    cdef Cut cut = cut_range(&x.plan, low, high)
    while next_piece(&x.plan, &cut):
        x.kernels.unpack(cut.piece.wire, cut.piece.dtype, cut.piece.target + offset(x, cut.piece, cut.low),
                         out + (cut.low - begin), elements(x, cut.piece, cut.high - cut.low))


cdef void identity_of_absent(Executor* x, char* into, uint64_t begin, uint64_t low, uint64_t high) noexcept nogil:
    """Write the identity for absent tensors into this rank's slot, in the range that it reduces itself and does not pack."""
    cdef Cut cut = cut_range(&x.plan, low, high)
    while next_piece(&x.plan, &cut):
        if cut.piece.source == NULL:
            fill_identity(into + (cut.low - begin), cut.piece.wire, x.reduction.op, elements(x, cut.piece, cut.high - cut.low))


cdef void find_slots(Executor* x, uint64_t n) noexcept nogil:
    """Fill in `slots`: each rank's slot of chunk n."""
    cdef int r
    for r in range(x.size):
        x.slots[r] = slot(x, r, n)


cdef void find_sources(Executor* x, const Cut* cut, uint64_t begin) noexcept nogil:
    """Fill in `sources`: each rank's values of a piece, after find_slots. This rank's are in its tensor, unless it is absent. The
    slots hold the logical buffer from `begin` on, which may have wrapped below zero."""
    cdef int r
    for r in range(x.size):
        x.sources[r] = x.slots[r] + (cut.low - begin)
    if cut.piece.source != NULL:
        x.sources[x.rank] = cut.piece.source + offset(x, cut.piece, cut.low)


cdef void reduce_range(Executor* x, uint64_t n, uint64_t begin, uint64_t low, uint64_t high, int copies) noexcept nogil:
    """Reduce [low, high) into the tensors and, with two copies, into this rank's slot. The slots hold it from `begin` on."""
    cdef Cut cut = cut_range(&x.plan, low, high)
    find_slots(x, n)
    x.reduction.copies = copies
    while next_piece(&x.plan, &cut):
        find_sources(x, &cut, begin)
        x.reduction.unscaled = x.rank if cut.piece.source != NULL else ENGINE_NO_SOURCE
        x.targets[0] = cut.piece.target + offset(x, cut.piece, cut.low)
        if copies > 1:
            x.targets[1] = x.slots[x.rank] + (cut.low - begin)
        x.reduction.dtype, x.reduction.tensor = cut.piece.wire, cut.piece.dtype
        x.kernels.reduce(&x.reduction, x.sources, <void* const*>x.targets, elements(x, cut.piece, cut.high - cut.low))


# ---- identities -------------------------------------------------------------------------------------------------------------

# The identity of each operation for each dtype leaves the other ranks' values unchanged.

# Bits of one element, by dtype: 1, the least value and the greatest value.
cdef uint64_t* ONE = [0x3C00, 0x3F80, 0x3F800000, 0x3FF0000000000000, 1, 1, 1, 1, 1, 1, 1]
cdef uint64_t* LEAST = [
    0xFC00, 0xFF80, 0xFF800000, 0xFFF0000000000000, 0x80, 0, 0x8000, 0, 0x80000000, 0x8000000000000000, 0,
]
cdef uint64_t* GREATEST = [
    0x7C00, 0x7F80, 0x7F800000, 0x7FF0000000000000, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x7FFFFFFFFFFFFFFF, 1,
]


cdef void fill_identity(char* into, int dtype, int op, uint64_t count) noexcept nogil:
    """Write `count` elements of the operation's identity."""
    cdef uint64_t bits, i
    cdef int item = <int>dtype_bytes(dtype)
    if op == ENGINE_SUM or op == ENGINE_AVERAGE or op == ENGINE_ADASUM:
        memset(into, 0, count * item)
        return
    bits = ONE[dtype] if op == ENGINE_PRODUCT else GREATEST[dtype] if op == ENGINE_MIN else LEAST[dtype]
    for i in range(count):          # little-endian: the low bytes of `bits` are the element
        memcpy(into + i * item, &bits, item)


# ---- fusion plan ------------------------------------------------------------------------------------------------------------

# Pieces of a plan lie one after another, at multiples of 64 bytes; the gaps between them have no meaning.

cdef void plan_clear(Plan* plan) noexcept nogil:
    """Empty the plan, and keep its memory."""
    plan.count, plan.end, plan.total = 0, 0, 0


cdef void plan_free(Plan* plan) noexcept nogil:
    free(plan.pieces)
    memset(plan, 0, sizeof(Plan))


cdef Piece* plan_add(
    Plan* plan, const char* source, char* target, uint64_t nbytes, int dtype, int wire, int64_t shared
) noexcept nogil:
    """Append a tensor of `nbytes`, which travels as `wire`; return its piece, NULL without memory."""
    plan.end = plan.total
    return plan_append(plan, source, target, nbytes, dtype, wire, shared)


cdef Piece* plan_append(
    Plan* plan, const char* source, char* target, uint64_t nbytes, int dtype, int wire, int64_t shared
) noexcept nogil:
    """Append a tensor like plan_add, but without a gap behind the last piece, which has the same dtype."""
    cdef Piece* pieces
    cdef Piece* piece
    if plan.count == plan.room:
        pieces = <Piece*>realloc(plan.pieces, (<size_t>plan.room * 2 + 64) * sizeof(Piece))
        if pieces == NULL:
            return NULL
        plan.pieces, plan.room = pieces, plan.room * 2 + 64
    piece = &plan.pieces[plan.count]
    piece.source, piece.target, piece.start = source, target, plan.end
    piece.nbytes = nbytes // <uint64_t>dtype_bytes(dtype) * <uint64_t>dtype_bytes(wire)
    piece.dtype, piece.wire, piece.shared = dtype, wire, shared
    plan.count += 1
    plan.end += piece.nbytes
    plan.total = (plan.end + PIECE_ALIGNMENT - 1) // PIECE_ALIGNMENT * PIECE_ALIGNMENT
    return piece


cdef int32_t plan_find(const Plan* plan, uint64_t at) noexcept nogil:
    """Return the number of the last piece that starts at or before `at`."""
    cdef int32_t low = 0, high = plan.count, middle
    while high - low > 1:
        middle = (low + high) // 2
        if plan.pieces[middle].start <= at:
            low = middle
        else:
            high = middle
    return low
