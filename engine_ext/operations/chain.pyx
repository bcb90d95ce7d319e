"""An allreduce whose sums pass from host to host, so that each host sends its data once, however many ranks it has.

*Chain*: the first host sums a chunk over its ranks and sends the sums to the next host, which adds its own ranks' values, and so
on. The last host has the result, which goes on in the same direction until all hosts have it. Ranks are added one after another,
as in a two-shot allreduce, so the bits are the same. If the ranks of a host are not consecutive, the order is by hosts.
*Ring*: a chunk is cut into a piece for each host, and each piece starts at another host. So all links carry equally much, and
less than the inner links of a chain. But the order in which an element is summed depends on its place in the fused buffer.

A *leg* is one host's work on a chunk: legs 0 .. hosts - 1 sum, those from `hosts` on pass the result on. Host `h` is at leg
(h - start) modulo hosts, and again `hosts` legs later. All ranks take the schedule's chunks through the stages together; leg l of
chunk r is done at chunk r + LAG * l of the entry. A chunk is reduced only when the one LAG before it has been copied, so when all
ranks have reduced that one. By then the sums of the previous host have arrived, and other bytes were in flight meanwhile. The
previous host reduces into the same slot again only after this host has reduced too, since LAG is half of SLOTS.

A slot holds the bytes that the rank has packed for ranks of its own host, then the sums of its part, then the result of its
part. A part is the range of a piece that one rank of a host reduces.
"""
from libc.stdint cimport int32_t, uint32_t, uint64_t

from engine_ext.data.executor cimport (
    PIECE_ALIGNMENT, Chain, Cut, Steps, chunk_end, copy_range, cut_range, elements, executor_start, identity_of_absent,
    next_piece, offer, offset, pack_range, share_start, slot,
)
from engine_ext.kernels.kernels cimport ENGINE_DTYPES, ENGINE_NO_SOURCE, ENGINE_PLAIN, engine_kernels, engine_kernels_get
from engine_ext.operations.operation cimport CHUNK_UNIT, chunks_of_plan
from engine_ext.shared.crews cimport crew_size, member
from engine_ext.shared.layout cimport (
    ALGORITHM_CHAIN, ALGORITHM_RING, BETWEEN_AUTO, BETWEEN_CARRIER, BETWEEN_DIRECT, BETWEEN_RING, SLOT_BYTES, SLOTS,
    engine_meta, wire_dtype,
)
from engine_ext.transport.transport cimport Stage

cdef enum:
    LAG = SLOTS // 2            # chunks of the entry between two legs of a chunk
    CHUNKS_A_LEG = 4            # least chunks for each leg, so that a host is idle during few of them
    AUTO_BYTES = 1 << 20        # least bytes for each leg: below it the chain's length costs more than it saves

cdef Steps STEPS = Steps(pack, reduce, copy, offer_parts, False, True)

cdef struct Part:               # the part [low, high), in the logical buffer, of a piece that one rank reduces
    uint64_t begin              # beginning of the piece
    uint64_t low
    uint64_t high


# ---- the choice of the algorithm and of chunks -------------------------------------------------------------------------------

cdef inline uint64_t last_leg(const Crews* crews) noexcept nogil:
    return 2 * <uint64_t>crews.hosts - 2


cdef uint64_t growth_of(const engine_kernels* kernels, int wire, int op) noexcept nogil:
    """Return the bytes of an accumulator for each byte that travels."""
    return <uint64_t>(kernels.types[wire].ops[op].size // kernels.types[wire].size)


cdef uint64_t growth_of_all(const engine_meta* meta) noexcept nogil:
    """Return the growth of a tensor, or of all tensors of a group; 0: theirs differ."""
    cdef uint64_t growth, found = 0
    cdef int d
    for d in range(ENGINE_DTYPES):
        if (meta.group and meta.dims[d]) or (not meta.group and d == meta.dtype):
            growth = growth_of(engine_kernels_get(ENGINE_PLAIN), wire_dtype(meta.wire, d), meta.op)
            if found and growth != found:
                return 0
            found = growth
    return found


cdef bint moves_less(const engine_entry* entry, const Crews* crews) noexcept nogil:
    """Return whether the busiest host receives fewer bytes than if every rank sent to every host (allreduce.pyx, two-shot)."""
    cdef double growth = <double>growth_of_all(&entry.meta), direct = 0
    cdef int h, crew
    for h in range(crews.hosts):
        crew = crew_size(crews, h)
        direct = max(direct, <double>((crew + 1) * (crews.size - crew)) / <double>crews.size)
    return (growth if crews.hosts == 2 else growth + 1) < direct


cdef bint choose_chain(engine_entry* entry, const engine_knobs* knobs, const Crews* crews) noexcept nogil:
    """Choose chain or ring for `entry` if the knob demands it, or if it leaves the choice open and this is faster. Return whether
    it did."""
    cdef uint64_t legs = last_leg(crews)
    if crews.hosts == 1 or knobs.between_hosts == BETWEEN_DIRECT or growth_of_all(&entry.meta) == 0:
        return False
    if knobs.between_hosts in (BETWEEN_AUTO, BETWEEN_CARRIER) and not (
            crews.consecutive and entry.bytes >= legs * <uint64_t>AUTO_BYTES and moves_less(entry, crews)):
        return False
    entry.algorithm = ALGORITHM_RING if knobs.between_hosts == BETWEEN_RING else ALGORITHM_CHAIN
    entry.chunk = <uint32_t>min(<uint64_t>knobs.chunk_bytes, entry.bytes // (legs * CHUNKS_A_LEG))
    return True


cdef inline uint64_t most_of(uint64_t nbytes, int shares) noexcept nogil:
    """Return an upper bound of a share's bytes."""
    return (nbytes // PIECE_ALIGNMENT // <uint64_t>shares + 2) * PIECE_ALIGNMENT


cdef bint lay_out_slot(Executor* x) noexcept nogil:
    """Lay out the slot of a chunk of `chunk` bytes; return whether it fits a slot."""
    cdef Chain* c = &x.chain
    c.piece = most_of(x.chunk, c.turns)
    c.part = most_of(c.piece, x.crews.smallest)
    return <uint64_t>c.turns * (c.piece + (c.growth + 1) * c.part) <= SLOT_BYTES


cdef bint chain_start(Executor* x, int turns) noexcept nogil:
    """Begin the entry that the plan describes, in pieces that start at `turns` hosts. False, and nothing is begun: its dtypes
    have sums of different growth. All ranks' plans have the same dtypes, so they get the same answer and the same chunk size."""
    cdef Chain* c = &x.chain
    cdef uint64_t growth
    cdef int32_t k
    c.turns, c.growth = turns, 0
    for k in range(x.plan.count):
        growth = growth_of(x.kernels, x.plan.pieces[k].wire, x.reduction.op)
        if c.growth and growth != c.growth:
            return False
        c.growth = growth
    while not lay_out_slot(x):
        x.chunk -= CHUNK_UNIT
    c.chunks = chunks_of_plan(x)
    x.reduction.count = crew_size(x.crews, own_host(x))
    executor_start(x, &STEPS, c.chunks + LAG * last_leg(x.crews) if c.chunks else 0)
    x.reduce_lag = LAG
    return True


# ---- places in the logical buffer and in slots -------------------------------------------------------------------------------

cdef inline int own_host(const Executor* x) noexcept nogil:
    return x.crews.host_of[x.rank]


cdef inline uint64_t first_leg(const Executor* x, int k) noexcept nogil:
    """Return the leg of piece k at which this host adds its ranks' values."""
    cdef int start = k if x.chain.turns > 1 else 0
    return <uint64_t>((own_host(x) - start + x.crews.hosts) % x.crews.hosts)


cdef inline bint is_due(const Executor* x, uint64_t n, uint64_t leg) noexcept nogil:
    """Return whether some chunk is at `leg` when chunk n of the entry passes a stage."""
    return leg <= last_leg(x.crews) and LAG * leg <= n < x.chain.chunks + LAG * leg


cdef inline Part part_of(const Executor* x, uint64_t n, uint64_t leg, int k, int host, int place) noexcept nogil:
    """Return the part of piece k that the rank of `host` at `place` reduces, of the chunk that is at `leg` at chunk n of the
    entry."""
    cdef Part part
    cdef uint64_t begin = (n - LAG * leg) * x.chunk, end = chunk_end(x, begin), piece_end
    part.begin, piece_end = share_start(begin, end, k, x.chain.turns), share_start(begin, end, k + 1, x.chain.turns)
    part.low = share_start(part.begin, piece_end, place, crew_size(x.crews, host))
    part.high = share_start(part.begin, piece_end, place + 1, crew_size(x.crews, host))
    return part


cdef inline uint64_t packed_at(const Executor* x, int k) noexcept nogil:
    """Return the offset in a slot of packed piece k, whose chunk is another than that of the other pieces there."""
    return <uint64_t>k * x.chain.piece


cdef inline uint64_t sums_at(const Executor* x, int k) noexcept nogil:
    """Return the offset in a slot of the sums of a part of piece k."""
    return packed_at(x, x.chain.turns) + <uint64_t>k * x.chain.growth * x.chain.part


cdef inline uint64_t result_at(const Executor* x, int k) noexcept nogil:
    """Return the offset in a slot of the result of a part of piece k."""
    return sums_at(x, x.chain.turns) + <uint64_t>k * x.chain.part


# ---- the stages --------------------------------------------------------------------------------------------------------------

cdef void pack(Executor* x, uint64_t n) noexcept nogil:
    """Write the parts that other ranks of this host reduce to the slot."""
    cdef char* into
    cdef uint64_t leg
    cdef Part mine, first, last
    cdef int k, crew = crew_size(x.crews, own_host(x)), place = x.crews.place_of[x.rank]
    for k in range(x.chain.turns):
        leg = first_leg(x, k)
        if not is_due(x, n, leg):
            continue
        mine = part_of(x, n, leg, k, own_host(x), place)
        first, last = part_of(x, n, leg, k, own_host(x), 0), part_of(x, n, leg, k, own_host(x), crew - 1)
        into = slot(x, x.rank, n) + packed_at(x, k)
        if first.low < mine.low:
            pack_range(x, into, mine.begin, first.low, mine.low)
        if mine.high < last.high:
            pack_range(x, into, mine.begin, mine.high, last.high)
        if x.needs_pack and mine.low < mine.high:
            identity_of_absent(x, into, mine.begin, mine.low, mine.high)


cdef void reduce(Executor* x, uint64_t n) noexcept nogil:
    cdef uint64_t leg
    cdef int k
    for k in range(x.chain.turns):
        leg = first_leg(x, k)
        if is_due(x, n, leg):
            add_crew(x, n, leg, k)
        if is_due(x, n, leg + <uint64_t>x.crews.hosts):
            hand_on(x, n, leg + <uint64_t>x.crews.hosts, k)


cdef void add_crew(Executor* x, uint64_t n, uint64_t leg, int k) noexcept nogil:
    """Add the values of this host's ranks, in this rank's part, to the sums that have come from the previous host."""
    cdef Part mine = part_of(x, n, leg, k, own_host(x), x.crews.place_of[x.rank]), other
    cdef int before = (own_host(x) + x.crews.hosts - 1) % x.crews.hosts, place
    if leg == 0:
        add_range(x, n, leg, k, mine, mine.low, mine.high, NULL, 0)
        return
    for place in range(crew_size(x.crews, before)):
        other = part_of(x, n, leg, k, before, place)
        add_range(x, n, leg, k, mine, max(mine.low, other.low), min(mine.high, other.high),
                  slot(x, member(x.crews, before, place), n - LAG) + sums_at(x, k), other.low)


cdef void add_range(Executor* x, uint64_t n, uint64_t leg, int k, Part mine, uint64_t low, uint64_t high, const char* sums,
                    uint64_t sums_low) noexcept nogil:
    """Add the values of this host's ranks in [low, high) to `sums`, which begin at `sums_low`; NULL: there are none yet. The last
    host writes the result."""
    cdef Cut cut = cut_range(&x.plan, low, high)
    cdef char* into = slot(x, x.rank, n)
    cdef const char* before
    cdef int place, rank
    if low >= high:
        return
    while next_piece(&x.plan, &cut):
        for place in range(x.reduction.count):
            rank = member(x.crews, own_host(x), place)
            x.sources[place] = slot(x, rank, n) + packed_at(x, k) + (cut.low - mine.begin)
        x.reduction.unscaled = ENGINE_NO_SOURCE
        if cut.piece.source != NULL:
            x.reduction.unscaled = x.crews.place_of[x.rank]
            x.sources[x.reduction.unscaled] = cut.piece.source + offset(x, cut.piece, cut.low)
        x.reduction.dtype, x.reduction.tensor = cut.piece.wire, cut.piece.dtype
        before = sums + (cut.low - sums_low) * x.chain.growth if sums != NULL else NULL
        if leg + 1 < <uint64_t>x.crews.hosts:
            x.kernels.reduce_onward(&x.reduction, before, x.sources, into + sums_at(x, k) + (cut.low - mine.low) * x.chain.growth,
                                    elements(x, cut.piece, cut.high - cut.low))
        else:
            x.reduction.copies = 2
            x.targets[0] = cut.piece.target + offset(x, cut.piece, cut.low)
            x.targets[1] = into + result_at(x, k) + (cut.low - mine.low)
            x.kernels.reduce_last(&x.reduction, before, x.sources, <void* const*>x.targets,
                                  elements(x, cut.piece, cut.high - cut.low))


cdef void hand_on(Executor* x, uint64_t n, uint64_t leg, int k) noexcept nogil:
    """Copy this rank's part of the result from the previous host's slots to its own."""
    cdef Part mine = part_of(x, n, leg, k, own_host(x), x.crews.place_of[x.rank]), other
    cdef int before = (own_host(x) + x.crews.hosts - 1) % x.crews.hosts, place
    cdef uint64_t low, high
    for place in range(crew_size(x.crews, before)):
        other = part_of(x, n, leg, k, before, place)
        low, high = max(mine.low, other.low), min(mine.high, other.high)
        if low < high:
            x.kernels.copy(slot(x, x.rank, n) + result_at(x, k) + (low - mine.low),
                           slot(x, member(x.crews, before, place), n - LAG) + result_at(x, k) + (low - other.low), high - low)


cdef void copy(Executor* x, uint64_t n) noexcept nogil:
    """Copy to the tensors the results that the ranks of this host have made or received."""
    cdef uint64_t leg
    cdef Part part
    cdef int k, place
    cdef bint made
    for k in range(x.chain.turns):
        leg = first_leg(x, k)
        made = leg + 1 == <uint64_t>x.crews.hosts
        leg += 0 if made else <uint64_t>x.crews.hosts
        if not is_due(x, n, leg):
            continue
        for place in range(x.reduction.count):
            part = part_of(x, n, leg, k, own_host(x), place)
            if part.low < part.high and not (made and place == x.crews.place_of[x.rank]):
                copy_range(x, slot(x, member(x.crews, own_host(x), place), n) + result_at(x, k), part.low, part.low, part.high)


cdef void offer_parts(Executor* x, Stage stage, uint64_t n) noexcept nogil:
    """Offer the sums or the result of this rank's part to the next host."""
    cdef int k, after = member(x.crews, (own_host(x) + 1) % x.crews.hosts, 0)
    cdef uint64_t leg
    cdef Part mine
    if stage != Stage.REDUCED:
        return
    for k in range(x.chain.turns):
        leg = first_leg(x, k)
        if is_due(x, n, leg) and leg + 1 < <uint64_t>x.crews.hosts:
            mine = part_of(x, n, leg, k, own_host(x), x.crews.place_of[x.rank])
            offer(x, after, n, sums_at(x, k), sums_at(x, k) + (mine.high - mine.low) * x.chain.growth)
        leg += 0 if leg + 1 == <uint64_t>x.crews.hosts else <uint64_t>x.crews.hosts
        if is_due(x, n, leg) and leg < last_leg(x.crews):
            mine = part_of(x, n, leg, k, own_host(x), x.crews.place_of[x.rank])
            offer(x, after, n, result_at(x, k), result_at(x, k) + mine.high - mine.low)
