"""An allreduce whose sums travel block-scaled between hosts: as float8 e4m3, with a power of two for each ENGINE_BLOCK
elements.

A tensor's result does not depend on the tensors that travel with it, nor on the rank that computes it:

1. Each rank's value is converted to float32 and multiplied by the prescale factor.
2. The values of each host's ranks are summed in float32, in their order; a rank without a tensor adds zero.
3. That sum is encoded and decoded.
4. These sums are added over hosts in float32, in the order of hosts, then divided and multiplied by the postscale factor.
5. That result is encoded, decoded and rounded to the tensor's dtype.

So a value is rounded to float8 twice, however many hosts there are. Blocks begin at a tensor's first element. The logical buffer
has one byte for each element. So pieces begin, and chunks are cut, only between blocks: PIECE_ALIGNMENT is the size of a block.

*Blocks*: a chunk is cut into a share for each host, and a share into a part for each rank of a host. In the first *leg* a rank
sums the values of its host's ranks in its part of every share, and sends these sums to the share's host. In the second leg the
ranks of that host add all hosts' sums of their parts, and send the result to all. The second leg follows LAG chunks later, in
the same stages, like legs of a chain (chain.pyx says why slots are free in time). If each host has one rank, the first leg needs
no other rank's values and is done while packing, so the second one follows at once.

*One-shot*, for small entries, and for groups that also have other dtypes: every rank offers its float32 values, and each rank
does all five steps. No block is cut, because tensors begin at multiples of ENGINE_BLOCK float32.

A slot holds the float32 values for the ranks of this host, if there are several; then for each host the rank's part of its
share; then the rank's part of the result. A part's codes are followed by its scales, so that both are read together.
"""
from libc.stdint cimport uint32_t, uint64_t, uint8_t
from libc.string cimport memset

from engine_ext.data.executor cimport (
    PIECE_ALIGNMENT, Blocks, Cut, Piece, Steps, chunk_end, cut_range, elements, executor_start, next_piece, offer, offset,
    pack_range, plan_add, reduce_range, share_start, slot,
)
from engine_ext.kernels.kernels cimport (
    ENGINE_BLOCK, ENGINE_FLOAT32, ENGINE_FLOAT8_E4M3FN, ENGINE_SUM, dtype_bytes,
)
from engine_ext.operations.operation cimport CHUNK_UNIT, ONE_SHOT_BYTES, chunks_of_plan, give_target, is_coded_whole
from engine_ext.shared.crews cimport crew_size, member
from engine_ext.shared.layout cimport (
    ALGORITHM_BLOCKS, ALGORITHM_ONE_SHOT, COORDINATOR, SLOT_BYTES, SLOTS, WIRE_FP8, wire_compresses,
)
from engine_ext.transport.transport cimport Stage

cdef enum:
    LAG = SLOTS // 2            # chunks by which the second leg follows the first
    STRETCH = 1024              # elements that are processed at once, so that they stay in the nearest cache
    STRETCH_BLOCKS = STRETCH // 64
    FLOAT_BYTES = 4
    NAN_SCALE = 255             # the scale of a block that is NaN (kernels_blocks.h)
    CHUNKS = SLOTS              # least number of chunks, so that all slots are in use

cdef Steps BLOCKS = Steps(pack, reduce, copy, offer_parts, False, True)
cdef Steps ONE_SHOT = Steps(pack_all, reduce_all, NULL, offer_all, False, True)

cdef struct Part:               # the part [low, high), in the logical buffer, of a share that one rank encodes
    uint64_t low
    uint64_t high


# ---- the choice of the algorithm and of chunks -------------------------------------------------------------------------------

cdef void choose_blocks(engine_entry* entry, const engine_knobs* knobs, const Crews* crews) noexcept nogil:
    """Choose the algorithm and the chunk size of a block-scaled entry."""
    if entry.bytes * FLOAT_BYTES * <uint64_t>crews.size <= ONE_SHOT_BYTES or not is_coded_whole(&entry.meta):
        entry.algorithm, entry.chunk = ALGORITHM_ONE_SHOT, SLOT_BYTES
        return
    entry.algorithm = ALGORITHM_BLOCKS
    entry.chunk = <uint32_t>min(<uint64_t>knobs.chunk_bytes, entry.bytes // CHUNKS)


cdef bint can_be_chosen(const engine_entry* entry) noexcept nogil:
    """Return whether a block-scaled entry can travel by the algorithm that it names."""
    return entry.algorithm == ALGORITHM_ONE_SHOT or (entry.algorithm == ALGORITHM_BLOCKS and is_coded_whole(&entry.meta))


cdef inline uint64_t most_of(uint64_t nbytes, int shares) noexcept nogil:
    """Return an upper bound of a share's elements."""
    return (nbytes // PIECE_ALIGNMENT // <uint64_t>shares + 2) * PIECE_ALIGNMENT


cdef inline uint64_t coded_bytes(uint64_t count) noexcept nogil:
    """Return the bytes of `count` encoded elements and their scales. `count` is a multiple of ENGINE_BLOCK."""
    return count + count // ENGINE_BLOCK


cdef bint lay_out_slot(Executor* x) noexcept nogil:
    """Lay out the slot of a chunk of `chunk` elements; return whether it fits a slot."""
    cdef Blocks* b = &x.blocks
    cdef uint64_t room = coded_bytes(most_of(most_of(x.chunk, x.crews.hosts), x.crews.smallest))
    b.packed = x.chunk * FLOAT_BYTES if x.crews.largest > 1 else 0
    b.part = (room + PIECE_ALIGNMENT - 1) // PIECE_ALIGNMENT * PIECE_ALIGNMENT
    return b.packed + <uint64_t>(x.crews.hosts + 1) * b.part <= SLOT_BYTES


cdef bint add_tensor(Executor* x, const engine_entry* entry, const char* source, char* target, uint64_t nbytes,
                     int dtype) noexcept nogil:
    """Append a tensor to the plan; False without memory, or if the entry cannot carry it."""
    cdef uint64_t block = ENGINE_BLOCK * FLOAT_BYTES
    cdef int wire = dtype
    if entry.algorithm == ALGORITHM_BLOCKS:
        if not wire_compresses(WIRE_FP8, dtype):
            return False            # the kernels would write past the end of the tensor
        wire = ENGINE_FLOAT8_E4M3FN
    elif wire_compresses(WIRE_FP8, dtype):
        wire = ENGINE_FLOAT32
        x.plan.total = (x.plan.total + block - 1) // block * block
    return plan_add(&x.plan, source, target, nbytes, dtype, wire, -1) != NULL


cdef bint plan_blocks(Executor* x, Op** batch, const engine_entry* entry) noexcept nogil:
    """Plan the entry's tensors; False without memory. Each tensor of a group has its own blocks, so ranks that have joined are
    told of them (ENTRY_MEMBERS)."""
    cdef uint32_t i, k
    cdef Op* op
    x.blocks.not_finite = 0
    for i in range(entry.items):
        op = batch[i]
        if not give_target(op) or (op.meta.group and op.members == NULL):
            return False
        if not op.meta.group and not add_tensor(x, entry, op.source, op.target, op.nbytes, op.meta.dtype):
            return False
        for k in range(op.meta.group):
            if op.members[k].nbytes and not add_tensor(x, entry, op.members[k].source, op.members[k].target,
                                                       op.members[k].nbytes, op.members[k].dtype):
                return False
    if entry.algorithm == ALGORITHM_BLOCKS:
        blocks_start(x)
    else:
        executor_start(x, &ONE_SHOT, chunks_of_plan(x))
    return True


cdef void blocks_start(Executor* x) noexcept nogil:
    """Begin the entry that the plan describes, by blocks."""
    while not lay_out_slot(x):
        x.chunk -= CHUNK_UNIT
    x.blocks.lag = LAG if x.crews.largest > 1 else 0
    x.blocks.chunks = chunks_of_plan(x)
    executor_start(x, &BLOCKS, x.blocks.chunks + x.blocks.lag if x.blocks.chunks else 0)
    if x.blocks.lag:
        x.reduce_lag = x.blocks.lag


# ---- ranks' values and hosts' sums -------------------------------------------------------------------------------------------

cdef const float* own_values(Executor* x, const Piece* piece, uint64_t first, uint64_t count, float* room) noexcept nogil:
    """Return this rank's elements of a piece from `first` on, as float32 and scaled: in the tensor if possible, else in `room`.
    """
    if piece.source == NULL:
        memset(room, 0, count * FLOAT_BYTES)
        return room
    if piece.dtype == ENGINE_FLOAT32 and x.reduction.prescale == 1:
        return <const float*>piece.source + first
    x.kernels.to_float(piece.dtype, x.reduction.prescale, room, piece.source + first * <uint64_t>dtype_bytes(piece.dtype), count)
    return room


cdef const float* sum_of_host(Executor* x, int host, uint64_t n, uint64_t place_in_slot, const Piece* piece, uint64_t first,
                              uint64_t count, float* room, float* own) noexcept nogil:
    """Return the sum of the values of the ranks of `host` in a piece, from element `first` on. The other ranks' values are at
    `place_in_slot` of their slots. The sum is in `room`, unless the host has one rank."""
    cdef int place, rank
    cdef const float* values
    cdef const float* total = NULL
    for place in range(crew_size(x.crews, host)):
        rank = member(x.crews, host, place)
        if rank == x.rank:
            values = own_values(x, piece, first, count, own)
        else:
            values = <const float*>(slot(x, rank, n) + place_in_slot)
        if total == NULL:
            total = values
        else:
            x.kernels.types[ENGINE_FLOAT32].ops[ENGINE_SUM].combine(room, total, values, count)
            total = room
    return total


cdef void encode_total(Executor* x, uint8_t* scales, uint8_t* codes, float* total, uint64_t count) noexcept nogil:
    """Divide, scale and encode the sum over all hosts, and count its blocks of NaN."""
    cdef uint64_t k
    if x.reduction.divisor != 1 or x.reduction.postscale != 1:
        x.kernels.types[ENGINE_FLOAT32].ops[ENGINE_SUM].finish(
            total, total, x.reduction.divisor, x.reduction.postscale, count)
    x.kernels.encode(scales, codes, total, count)
    for k in range((count + ENGINE_BLOCK - 1) // ENGINE_BLOCK):
        x.blocks.not_finite += scales[k] == NAN_SCALE


# ---- places in the logical buffer and in slots -------------------------------------------------------------------------------

cdef inline int own_host(const Executor* x) noexcept nogil:
    return x.crews.host_of[x.rank]


cdef inline Part part_of(const Executor* x, uint64_t n, int k, int host, int place) noexcept nogil:
    """Return the part of host `k`'s share of chunk `n` of the logical buffer that the rank of `host` at `place` encodes."""
    cdef Part part
    cdef uint64_t begin = n * x.chunk, end = chunk_end(x, begin)
    cdef uint64_t low = share_start(begin, end, k, x.crews.hosts), high = share_start(begin, end, k + 1, x.crews.hosts)
    part.low = share_start(low, high, place, crew_size(x.crews, host))
    part.high = share_start(low, high, place + 1, crew_size(x.crews, host))
    return part


cdef inline Part own_part(const Executor* x, uint64_t n, int k) noexcept nogil:
    return part_of(x, n, k, own_host(x), x.crews.place_of[x.rank])


cdef inline uint64_t floats_at(const Executor* x, uint64_t n, uint64_t at) noexcept nogil:
    """Return the offset in a slot of the float32 of element `at` of the logical buffer, which is in chunk `n`."""
    return (at - n * x.chunk) * FLOAT_BYTES


cdef inline uint64_t sums_at(const Executor* x, int k) noexcept nogil:
    """Return the offset in a slot of a rank's part of the share of host `k`."""
    return x.blocks.packed + <uint64_t>k * x.blocks.part


cdef inline uint64_t result_at(const Executor* x) noexcept nogil:
    """Return the offset in a slot of a rank's part of the result."""
    return sums_at(x, x.crews.hosts)


cdef inline uint8_t* codes_in(const Part* part, char* region, uint64_t at) noexcept nogil:
    """Return the address, in the region of a part, of the code of element `at`."""
    return <uint8_t*>region + (at - part.low)


cdef inline uint8_t* scales_in(const Part* part, char* region, uint64_t at) noexcept nogil:
    """Return the address, in the region of a part, of the scale of the block that begins at `at`."""
    return <uint8_t*>region + (part.high - part.low) + (at - part.low) // ENGINE_BLOCK


# ---- the stages --------------------------------------------------------------------------------------------------------------

cdef void pack(Executor* x, uint64_t n) noexcept nogil:
    """Write the values that other ranks of this host sum to the slot; if every host has one rank, encode them at once."""
    cdef Part part
    cdef int k, place
    if x.blocks.lag == 0:
        encode_sums(x, n)
        return
    if n >= x.blocks.chunks:
        return
    for k in range(x.crews.hosts):
        for place in range(crew_size(x.crews, own_host(x))):
            part = part_of(x, n, k, own_host(x), place)
            if place != x.crews.place_of[x.rank] and part.low < part.high:
                pack_floats(x, n, part)


cdef void pack_floats(Executor* x, uint64_t n, Part part) noexcept nogil:
    """Write this rank's float32 values of another rank's part to the slot."""
    cdef Cut cut = cut_range(&x.plan, part.low, part.high)
    cdef float* into
    cdef const float* values
    cdef uint64_t count
    while next_piece(&x.plan, &cut):
        into = <float*>(slot(x, x.rank, n) + floats_at(x, n, cut.low))
        count = cut.high - cut.low
        values = own_values(x, cut.piece, cut.low - cut.piece.start, count, into)
        if values != into:
            x.kernels.copy(into, values, count * FLOAT_BYTES)


cdef void reduce(Executor* x, uint64_t n) noexcept nogil:
    if x.blocks.lag and n < x.blocks.chunks:
        encode_sums(x, n)
    if n >= x.blocks.lag:
        encode_result(x, n)


cdef void encode_sums(Executor* x, uint64_t n) noexcept nogil:
    """Do the first leg of chunk `n`: sum and encode this host's values in this rank's part of every share."""
    cdef float[STRETCH] room
    cdef float[STRETCH] own
    cdef char* region
    cdef const float* total
    cdef Cut cut
    cdef Part part
    cdef uint64_t at, count
    cdef int k
    for k in range(x.crews.hosts):
        part = own_part(x, n, k)
        if part.low >= part.high:
            continue
        region = slot(x, x.rank, n) + sums_at(x, k)
        cut = cut_range(&x.plan, part.low, part.high)
        while next_piece(&x.plan, &cut):
            at = cut.low
            while at < cut.high:
                count = min(cut.high - at, <uint64_t>STRETCH)
                total = sum_of_host(x, own_host(x), n, floats_at(x, n, at), cut.piece, at - cut.piece.start, count, room, own)
                x.kernels.encode(scales_in(&part, region, at), codes_in(&part, region, at), total, count)
                at += count


cdef void encode_result(Executor* x, uint64_t n) noexcept nogil:
    """Do the second leg of chunk n - lag: add all hosts' sums in this rank's part of its host's share, and encode the result."""
    cdef float[STRETCH] total
    cdef uint64_t first = n - x.blocks.lag, at, count
    cdef Part part = own_part(x, first, own_host(x))
    cdef char* region = slot(x, x.rank, n) + result_at(x)
    cdef Cut cut
    cdef int host
    if part.low >= part.high:
        return
    cut = cut_range(&x.plan, part.low, part.high)
    while next_piece(&x.plan, &cut):
        at = cut.low
        while at < cut.high:
            count = min(cut.high - at, <uint64_t>STRETCH)
            for host in range(x.crews.hosts):
                add_host(x, first, host, at, count, total)
            encode_total(x, scales_in(&part, region, at), codes_in(&part, region, at), total, count)
            at += count


cdef void add_host(Executor* x, uint64_t n, int host, uint64_t at, uint64_t count, float* total) noexcept nogil:
    """Add the sums of `host` in this host's share, from element `at` on; host 0's replace the old content of `total`. The ranks
    of `host` may have cut the share differently."""
    cdef uint64_t low, high
    cdef Part part
    cdef char* region
    cdef int place
    for place in range(crew_size(x.crews, host)):
        part = part_of(x, n, own_host(x), host, place)
        low, high = max(at, part.low), min(at + count, part.high)
        if low >= high:
            continue
        region = slot(x, member(x.crews, host, place), n) + sums_at(x, own_host(x))
        if host == 0:
            x.kernels.decode(total + (low - at), scales_in(&part, region, low), codes_in(&part, region, low), high - low)
        else:
            x.kernels.decode_add(total + (low - at), scales_in(&part, region, low), codes_in(&part, region, low), high - low)


cdef void copy(Executor* x, uint64_t n) noexcept nogil:
    """Decode the results of all ranks. This rank decodes its own, too, so that it has the same values as the others."""
    cdef uint64_t first = n - x.blocks.lag
    cdef Part part
    cdef int host, place
    if n < x.blocks.lag:
        return
    for host in range(x.crews.hosts):
        for place in range(crew_size(x.crews, host)):
            part = part_of(x, first, host, host, place)
            if part.low < part.high:
                decode_result(x, part, slot(x, member(x.crews, host, place), n) + result_at(x))


cdef void decode_result(Executor* x, Part part, char* region) noexcept nogil:
    """Decode a part of the result into the tensors."""
    cdef float[STRETCH] room
    cdef Cut cut = cut_range(&x.plan, part.low, part.high)
    cdef char* target
    cdef uint64_t at, count
    while next_piece(&x.plan, &cut):
        at = cut.low
        while at < cut.high:
            target = cut.piece.target + offset(x, cut.piece, at)
            if cut.piece.dtype == ENGINE_FLOAT32:
                count = cut.high - at
                x.kernels.decode(<float*>target, scales_in(&part, region, at), codes_in(&part, region, at), count)
            else:
                count = min(cut.high - at, <uint64_t>STRETCH)
                x.kernels.decode(room, scales_in(&part, region, at), codes_in(&part, region, at), count)
                x.kernels.from_float(cut.piece.dtype, target, room, count)
            at += count


cdef void offer_parts(Executor* x, Stage stage, uint64_t n) noexcept nogil:
    """Offer to each other host this rank's part of that host's share, and to all ranks this rank's part of the result."""
    cdef Part part
    cdef int k
    if stage == (Stage.REDUCED if x.blocks.lag else Stage.PACKED) and n < x.blocks.chunks:
        for k in range(x.crews.hosts):
            part = own_part(x, n, k)
            if k != own_host(x):
                offer(x, member(x.crews, k, 0), n, sums_at(x, k), sums_at(x, k) + coded_bytes(part.high - part.low))
    if stage == Stage.REDUCED and n >= x.blocks.lag:
        part = own_part(x, n - x.blocks.lag, own_host(x))
        offer(x, -1, n, result_at(x), result_at(x) + coded_bytes(part.high - part.low))


# ---- one-shot ----------------------------------------------------------------------------------------------------------------

cdef void pack_all(Executor* x, uint64_t n) noexcept nogil:
    cdef uint64_t begin = n * x.chunk, first, count
    cdef Cut cut = cut_range(&x.plan, begin, chunk_end(x, begin))
    cdef char* into
    cdef const float* values
    while next_piece(&x.plan, &cut):
        into = slot(x, x.rank, n) + (cut.low - begin)
        if not wire_compresses(WIRE_FP8, cut.piece.dtype):
            pack_range(x, into, cut.low, cut.low, cut.high)
            continue
        first, count = elements(x, cut.piece, cut.low - cut.piece.start), elements(x, cut.piece, cut.high - cut.low)
        values = own_values(x, cut.piece, first, count, <float*>into)
        if <const char*>values != into:
            x.kernels.copy(into, values, count * FLOAT_BYTES)


cdef void reduce_all(Executor* x, uint64_t n) noexcept nogil:
    cdef uint64_t begin = n * x.chunk
    cdef Cut cut = cut_range(&x.plan, begin, chunk_end(x, begin))
    while next_piece(&x.plan, &cut):
        if wire_compresses(WIRE_FP8, cut.piece.dtype):
            reduce_floats(x, n, begin, &cut)
        else:
            reduce_range(x, n, begin, cut.low, cut.high, 1)


cdef void reduce_floats(Executor* x, uint64_t n, uint64_t begin, const Cut* cut) noexcept nogil:
    """Do all five steps for a range of a tensor, which begins with a block. Every rank makes the same result; only the
    coordinator's rank counts blocks of NaN."""
    cdef float[STRETCH] total
    cdef float[STRETCH] room
    cdef float[STRETCH] own
    cdef uint8_t[STRETCH] codes
    cdef uint8_t[STRETCH_BLOCKS] scales
    cdef const float* values
    cdef uint64_t at = cut.low, first, count
    cdef int host
    while at < cut.high:
        first = elements(x, cut.piece, at - cut.piece.start)
        count = min(elements(x, cut.piece, cut.high - at), <uint64_t>STRETCH)
        for host in range(x.crews.hosts):
            values = sum_of_host(x, host, n, at - begin, cut.piece, first, count, room, own)
            x.kernels.encode(scales, codes, values, count)
            if host == 0:
                x.kernels.decode(total, scales, codes, count)
            else:
                x.kernels.decode_add(total, scales, codes, count)
        encode_total(x, scales, codes, total, count)
        x.kernels.decode(total, scales, codes, count)
        x.kernels.from_float(cut.piece.dtype, cut.piece.target + offset(x, cut.piece, at), total, count)
        at += count * FLOAT_BYTES
    if x.rank != COORDINATOR:
        x.blocks.not_finite = 0


cdef void offer_all(Executor* x, Stage stage, uint64_t n) noexcept nogil:
    cdef uint64_t begin = n * x.chunk
    if stage == Stage.PACKED:
        offer(x, -1, n, 0, chunk_end(x, begin) - begin)
