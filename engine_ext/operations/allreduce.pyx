"""Allreduce: every rank gets the ranks' tensors, reduced element by element.

*One-shot*, for small entries: every rank offers everything and reduces everything. *Two-shot*: rank r reduces part r of each
chunk, and all ranks copy it from there. *Shared*: tensors lie in the arena, where all ranks reach them, so rank r reduces part r
of every tensor in place and writes it to all ranks' tensors. On several hosts sums may pass from host to host instead
(chain.pyx), travel block-scaled (blocks.pyx), or be made by the lanes' carrier.
"""
from libc.string cimport memset

from engine_ext.data.executor cimport (
    Cut, Steps, chunk_end, copy_range, cut_range, elements, executor_start, fill_identity, identity_of_absent, next_piece,
    offer, offset, pack_range, part_start, reduce_range, slot,
)
from engine_ext.kernels.kernels cimport (
    ENGINE_AVERAGE, ENGINE_EVERY_SOURCE, ENGINE_FLOAT32, ENGINE_FLOAT64, ENGINE_NO_SOURCE, ENGINE_SUM,
    dtype_bytes,
)
from engine_ext.operations.blocks cimport choose_blocks, plan_blocks
from engine_ext.operations.chain cimport chain_start, choose_chain
from engine_ext.operations.op cimport Op
from engine_ext.operations.operation cimport (
    ONE_SHOT_BYTES, bytes_of_all, choose_two_shot, chunks_of_plan, has_one_dtype, plan_tensors, stand_in_tensor,
)
from engine_ext.shared.layout cimport (
    ALGORITHM_CARRIER, ALGORITHM_CHAIN, ALGORITHM_ONE_SHOT, ALGORITHM_RING, ALGORITHM_SHARED, BETWEEN_CARRIER, SLOT_BYTES,
    WIRE_FP8, wire_dtype,
)
from engine_ext.transport.arena cimport arena_address

cdef Steps ONE_SHOT = Steps(pack_all, reduce_all, NULL, offer_all, False, True)
cdef Steps TWO_SHOT = Steps(pack_parts, reduce_part, copy_parts, offer_parts, False, True)
cdef Steps SHARED = Steps(pack_shared, reduce_shared, copy_shared, NULL, True, True)


cdef Operation allreduce_row() noexcept:
    cdef Operation row
    memset(&row, 0, sizeof(row))
    row.reduces = row.moves = row.optional = row.codes = True
    row.bytes, row.choose, row.stand_in, row.plan = bytes_of_all, choose, stand_in_tensor, plan
    return row


cdef void choose(engine_entry* entry, const engine_knobs* knobs, const Crews* crews) noexcept nogil:
    if entry.meta.shared >= 0:
        entry.algorithm = ALGORITHM_SHARED
    elif entry.meta.wire == WIRE_FP8:
        choose_blocks(entry, knobs, crews)
    elif entry.bytes * <uint64_t>crews.size <= ONE_SHOT_BYTES:
        entry.algorithm, entry.chunk = ALGORITHM_ONE_SHOT, SLOT_BYTES
    elif not choose_carrier_sum(entry, knobs, crews) and not choose_chain(entry, knobs, crews):
        choose_two_shot(entry, knobs, crews)


cdef bint plan(Executor* x, Op** batch, const engine_entry* entry) noexcept nogil:
    cdef const Steps* steps = &TWO_SHOT
    if entry.meta.wire == WIRE_FP8:
        return plan_blocks(x, batch, entry)
    if not plan_tensors(x, batch, entry):
        return False
    if entry.algorithm == ALGORITHM_CHAIN or entry.algorithm == ALGORITHM_RING:
        if chain_start(x, x.crews.hosts if entry.algorithm == ALGORITHM_RING else 1):
            return True
    if entry.algorithm == ALGORITHM_CARRIER:
        return carrier_sum_start(x)
    if entry.algorithm == ALGORITHM_SHARED:
        steps, x.chunk = &SHARED, x.plan.total         # one chunk, which is cut only into ranks' parts
    elif entry.algorithm == ALGORITHM_ONE_SHOT:
        steps = &ONE_SHOT
    executor_start(x, steps, chunks_of_plan(x))
    return True


# ---- one-shot ----------------------------------------------------------------------------------------------------------------

cdef void pack_all(Executor* x, uint64_t n) noexcept nogil:
    cdef uint64_t begin = n * x.chunk
    pack_range(x, slot(x, x.rank, n), begin, begin, chunk_end(x, begin))


cdef void reduce_all(Executor* x, uint64_t n) noexcept nogil:
    cdef uint64_t begin = n * x.chunk
    reduce_range(x, n, begin, begin, chunk_end(x, begin), 1)


cdef void offer_all(Executor* x, Stage stage, uint64_t n) noexcept nogil:
    cdef uint64_t begin = n * x.chunk
    if stage == Stage.PACKED:
        offer(x, -1, n, 0, chunk_end(x, begin) - begin)


# ---- two-shot ----------------------------------------------------------------------------------------------------------------

cdef void pack_parts_of_others(Executor* x, uint64_t n, uint64_t begin) noexcept nogil:
    """Write the parts that other ranks reduce of chunk n, which begins at `begin` of the logical buffer, to the slot. This rank's
    own part gets the identity for absent tensors."""
    cdef uint64_t end = chunk_end(x, begin)
    cdef uint64_t low = part_start(x, begin, end, x.rank), high = part_start(x, begin, end, x.rank + 1)
    cdef char* into = slot(x, x.rank, n)
    if begin < low:
        pack_range(x, into, begin, begin, low)
    if high < end:
        pack_range(x, into, begin, high, end)
    if x.needs_pack and low < high:
        identity_of_absent(x, into, begin, low, high)


cdef void copy_parts_of_others(Executor* x, uint64_t n, uint64_t begin) noexcept nogil:
    """Copy the parts that other ranks have reduced of chunk n to the tensors."""
    cdef uint64_t end = chunk_end(x, begin), low, high
    cdef int r
    for r in range(x.size):
        low, high = part_start(x, begin, end, r), part_start(x, begin, end, r + 1)
        if r != x.rank and low < high:
            copy_range(x, slot(x, r, n), begin, low, high)


cdef void offer_parts_to_others(Executor* x, Stage stage, uint64_t n, uint64_t begin) noexcept nogil:
    """Offer each rank the part of chunk n that it reduces, and later all ranks the part that this one has reduced."""
    cdef uint64_t end = chunk_end(x, begin)
    cdef int r
    if stage == Stage.PACKED:
        for r in range(x.size):
            offer(x, r, n, part_start(x, begin, end, r) - begin, part_start(x, begin, end, r + 1) - begin)
    elif stage == Stage.REDUCED:
        offer(x, -1, n, part_start(x, begin, end, x.rank) - begin, part_start(x, begin, end, x.rank + 1) - begin)


cdef void offer_parts(Executor* x, Stage stage, uint64_t n) noexcept nogil:
    offer_parts_to_others(x, stage, n, n * x.chunk)


cdef void pack_parts(Executor* x, uint64_t n) noexcept nogil:
    pack_parts_of_others(x, n, n * x.chunk)


cdef void reduce_part(Executor* x, uint64_t n) noexcept nogil:
    cdef uint64_t begin = n * x.chunk, end = chunk_end(x, begin)
    cdef uint64_t low = part_start(x, begin, end, x.rank), high = part_start(x, begin, end, x.rank + 1)
    if low < high:
        reduce_range(x, n, begin, low, high, 2 if x.size > 1 else 1)


cdef void copy_parts(Executor* x, uint64_t n) noexcept nogil:
    copy_parts_of_others(x, n, n * x.chunk)


# ---- shared ------------------------------------------------------------------------------------------------------------------

cdef void pack_shared(Executor* x, uint64_t n) noexcept nogil:
    """Write the identity into absent tensors before others read them. The other tensors are in the arena already."""
    cdef Cut cut = cut_range(&x.plan, 0, x.plan.total)
    while x.needs_pack and next_piece(&x.plan, &cut):
        if cut.piece.source == NULL:
            fill_identity(arena_address(x.arena, cut.piece.shared, x.rank), cut.piece.dtype, x.reduction.op,
                          elements(x, cut.piece, cut.piece.nbytes))


cdef void reduce_shared(Executor* x, uint64_t n) noexcept nogil:
    cdef uint64_t end = chunk_end(x, 0), at
    cdef Cut cut = cut_range(&x.plan, part_start(x, 0, end, x.rank), part_start(x, 0, end, x.rank + 1))
    cdef int r, t
    x.reduction.unscaled = ENGINE_EVERY_SOURCE
    x.reduction.copies = x.size
    while next_piece(&x.plan, &cut):
        at = cut.low - cut.piece.start
        x.targets[0] = arena_address(x.arena, cut.piece.shared, x.rank) + at
        t = 1
        for r in range(x.size):
            x.sources[r] = arena_address(x.arena, cut.piece.shared, r) + at
            if r != x.rank:
                x.targets[t] = <void*>x.sources[r]
                t += 1
        x.reduction.dtype, x.reduction.tensor = cut.piece.wire, cut.piece.dtype
        x.kernels.reduce(&x.reduction, x.sources, <void* const*>x.targets, elements(x, cut.piece, cut.high - cut.low))


cdef void copy_shared(Executor* x, uint64_t n) noexcept nogil:
    """Do nothing: once all ranks have reduced, each has written its part into this rank's tensors."""


# ---- sums by a carrier ------------------------------------------------------------------------------------------------------

# The lanes' carrier makes this allreduce: with MPI, one MPI_Iallreduce over all ranks for each entry, as other engines do it.
#
# It serves to be compared with the engine's own algorithms, and for networks that an MPI library knows better. The carrier has
# its own order of summation, which depends on an element's place in the fused buffer, so fusion changes bits. Only sums of
# float32 and float64 go this way. Sums of halves would be rounded at each step, and integer sums are exact in any order.
#
# The logical buffer is packed as one chunk into memory of the transport, and summed there; nothing goes through the slots. Every
# rank reaches the entries to be summed in the order of the schedule, as a carrier requires.

cdef enum:
    LONGEST = 0x7FFFFFFF   # bytes; entries this long are not summed: MPI counts elements by an int, and so may other carriers

cdef Steps STEPS = Steps(pack, finish, NULL, NULL, True, False)


cdef bint carrier_can_sum(const engine_meta* meta) noexcept nogil:
    """Return whether a carrier can sum such tensors: all are float32 or all float64, and travel uncompressed."""
    return ((meta.op == ENGINE_SUM or meta.op == ENGINE_AVERAGE) and has_one_dtype(meta)
            and (meta.dtype == ENGINE_FLOAT32 or meta.dtype == ENGINE_FLOAT64)
            and wire_dtype(meta.wire, meta.dtype) == meta.dtype)


cdef bint choose_carrier_sum(engine_entry* entry, const engine_knobs* knobs, const Crews* crews) noexcept nogil:
    """Choose the carrier to sum `entry` if the knob says so and it can; return whether it was chosen."""
    if (knobs.between_hosts != BETWEEN_CARRIER or not crews.summing or entry.bytes >= LONGEST
            or not carrier_can_sum(&entry.meta)):
        return False
    entry.algorithm, entry.chunk = ALGORITHM_CARRIER, SLOT_BYTES
    return True


cdef bint carrier_sum_start(Executor* x) noexcept nogil:
    """Begin the entry that the plan describes; False without memory, or if its tensors are not of one dtype."""
    cdef int k
    for k in range(1, x.plan.count):
        if x.plan.pieces[k].wire != x.plan.pieces[0].wire:
            return False
    x.chunk = x.plan.total
    if x.plan.total and x.transport.sum_room(x.transport, x.plan.total) == NULL:
        return False
    x.reduction.count, x.reduction.copies, x.reduction.unscaled = 1, 1, ENGINE_NO_SOURCE
    executor_start(x, &STEPS, chunks_of_plan(x))
    x.sums = True
    return True


cdef void pack(Executor* x, uint64_t n) noexcept nogil:
    """Pack everything into the transport's memory, and begin its sum."""
    cdef uint64_t item_bytes = <uint64_t>dtype_bytes(x.plan.pieces[0].wire)
    pack_range(x, x.transport.sum_room(x.transport, x.plan.total), 0, 0, x.plan.total)
    x.transport.sum(x.transport, (x.plan.total + item_bytes - 1) // item_bytes, <int>item_bytes)


cdef void finish(Executor* x, uint64_t n) noexcept nogil:
    """Copy the sums to the tensors, divided and scaled on the way."""
    cdef const char* sums = x.transport.sum_room(x.transport, x.plan.total)
    cdef Cut cut = cut_range(&x.plan, 0, x.plan.total)
    while next_piece(&x.plan, &cut):
        x.sources[0] = sums + cut.low
        x.targets[0] = cut.piece.target + offset(x, cut.piece, cut.low)
        x.reduction.dtype, x.reduction.tensor = cut.piece.wire, cut.piece.dtype
        x.kernels.reduce(&x.reduction, x.sources, <void* const*>x.targets, elements(x, cut.piece, cut.high - cut.low))
