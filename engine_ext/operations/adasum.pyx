"""Adasum: the ranks' vectors, combined in pairs by how far they agree (Maleki et al., arXiv 2006.02924).

    adasum(a, b) = (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b        the coefficient of a vector of norm zero is 1

Vectors are combined in a binary tree: ranks 2i and 2i + 1 first, then pairs of pairs. Every tensor has its own coefficients.

Each vector of that tree is a weighted sum of the ranks' vectors, so its inner products follow from those of the ranks' vectors.
So one exchange is enough for any number of ranks, no intermediate vector is ever made, and the result is rounded once:

    chunks [0, measured)        Rank r gets part r of every tensor from all ranks, and computes inner products of all pairs.
    chunks [measured, lead)     The products, summed over the parts in the order of ranks: a two-shot sum in float64.
    chunks [lead, end)          The weighted sum, two-shot, like any sum (allreduce.pyx).

A compartment (data/executor.pxd) has a share for each tensor, equally long for all ranks. So the part of a tensor that a rank
measures, and its order of additions, depend only on the tensor and the number of ranks: fusion and chunk size change no bit.
"""
from libc.stdint cimport int32_t, uint64_t
from libc.stdlib cimport realloc
from libc.string cimport memset

from engine_ext.data.executor cimport (
    PIECE_ALIGNMENT, Adasum, Cut, Executor, Piece, Steps, chunk_end, compartment, cut_range, elements, executor_start,
    find_slots, find_sources, next_piece, offer, offset, part_start, place, slot,
)
from engine_ext.kernels.kernels cimport ENGINE_INNER_LANES
from engine_ext.operations.allreduce cimport copy_parts_of_others, offer_parts_to_others, pack_parts_of_others
from engine_ext.operations.op cimport Op
from engine_ext.operations.operation cimport bytes_of_all, choose_scatter, chunks_of_plan, plan_tensors, stand_in_tensor
from engine_ext.shared.crews cimport Crews
from engine_ext.shared.layout cimport ALGORITHM_ADASUM, SLOT_BYTES, engine_entry, engine_knobs
from engine_ext.transport.transport cimport Stage

cdef Steps STEPS = Steps(pack, reduce, copy, offer_chunk, False, True)

# A vector of the tree counts as zero if its squared norm is at most this fraction of the sum of its terms' magnitudes. Then its
# ranks cancel each other within the resolution of float32, (2^-24)^2, and the direction of the remainder is random.
cdef double CANCELLED = 2.0 ** -48


cdef inline int32_t count_pairs(const Executor* x) noexcept nogil:
    """Return the number of inner products of a tensor: (0, 0), (0, 1) .. (1, 1), (1, 2) .., in the order of `inner` (kernels.h).
    """
    return x.size * (x.size + 1) // 2


cdef Operation adasum_row() noexcept:
    cdef Operation row
    memset(&row, 0, sizeof(row))
    row.reduces = row.moves = row.optional = row.tells_members = True
    row.bytes, row.choose, row.stand_in, row.plan = bytes_of_all, choose, stand_in_tensor, plan
    return row


cdef void choose(engine_entry* entry, const engine_knobs* knobs, const Crews* crews) noexcept nogil:
    choose_scatter(entry, knobs, crews)
    entry.algorithm = ALGORITHM_ADASUM


cdef bint plan(Executor* x, Op** batch, const engine_entry* entry) noexcept nogil:
    return plan_tensors(x, batch, entry) and start(x)


cdef bint start(Executor* x) noexcept nogil:
    """Begin the entry that the plan describes; False without memory."""
    cdef Adasum* a = &x.adasum
    cdef uint64_t size = <uint64_t>x.size, count = <uint64_t>x.plan.count, lines, room, exchanged
    cdef uint64_t products = count * <uint64_t>count_pairs(x), lanes = <uint64_t>count_pairs(x) * ENGINE_INNER_LANES, k
    cdef char* memory
    room = 8 * (count + 1 + products + count * size + lanes)
    if room > a.room:
        memory = <char*>realloc(a.memory, room)
        if memory == NULL:
            return False
        a.memory, a.room = memory, room
    memset(a.memory, 0, room)
    a.starts = <uint64_t*>a.memory
    a.products = <double*>(a.starts + count + 1)
    a.weights = a.products + products
    a.lanes = a.weights + count * size
    for k in range(count):
        lines = (x.plan.pieces[k].nbytes + PIECE_ALIGNMENT - 1) // PIECE_ALIGNMENT
        a.starts[k + 1] = a.starts[k] + (lines + size - 1) // size * PIECE_ALIGNMENT
    a.measured = exchanged = 0
    if size > 1 and x.plan.total:
        a.measured = (a.starts[count] + compartment(x) - 1) // compartment(x)
        exchanged = (products * 8 + SLOT_BYTES - 1) // SLOT_BYTES
    # Adasum is linear in a common factor, so both factors are applied to the weights, and no value is rounded for them.
    a.factor = x.reduction.prescale * x.reduction.postscale
    x.reduction.prescale = 1.0
    if size == 1:
        weigh_ranks(x)
    a.lead = a.measured + exchanged
    executor_start(x, &STEPS, a.lead + chunks_of_plan(x))
    x.uncopied = x.pack_gate = x.first + a.measured
    x.reduce_gate = x.first + a.lead
    return True


# ---- the inner products of this rank's parts ---------------------------------------------------------------------------------

cdef int32_t share_at(const Executor* x, uint64_t at) noexcept nogil:
    """Return the number of the last piece whose share of the compartments begins at or before byte `at`."""
    cdef int32_t low = 0, high = x.plan.count, middle
    while high - low > 1:
        middle = (low + high) // 2
        if x.adasum.starts[middle] <= at:
            low = middle
        else:
            high = middle
    return low


cdef inline uint64_t part_offset(const Executor* x, int32_t k, int rank, uint64_t at) noexcept nogil:
    """Return which byte of piece k lies at byte `at` of the compartments of `rank`; the piece's end if it is shorter."""
    cdef const uint64_t* start = &x.adasum.starts[k]
    return min(<uint64_t>rank * (start[1] - start[0]) + at - start[0], x.plan.pieces[k].nbytes)


cdef void pack_parts(Executor* x, uint64_t n) noexcept nogil:
    """Write the parts that other ranks measure to this rank's slot, with zeros for absent tensors."""
    cdef uint64_t begin = n * compartment(x), end = min(begin + compartment(x), x.adasum.starts[x.plan.count]), low, high, a, b
    cdef int32_t k = share_at(x, begin)
    cdef Piece* piece
    cdef char* into
    cdef int r
    while k < x.plan.count and x.adasum.starts[k] < end:
        piece = &x.plan.pieces[k]
        low, high = max(begin, x.adasum.starts[k]), min(end, x.adasum.starts[k + 1])
        for r in range(x.size):
            a, b = part_offset(x, k, r, low), part_offset(x, k, r, high)
            into = place(x, x.rank, n, r) + (low - begin)
            if a < b and piece.source == NULL:
                memset(into, 0, b - a)
            elif a < b and r != x.rank:
                x.kernels.pack(piece.dtype, piece.dtype, 1.0, x.streaming, into, piece.source + a, elements(x, piece, b - a))
        k += 1


cdef void measure_parts(Executor* x, uint64_t n) noexcept nogil:
    """Add the products of all ranks' values in this rank's compartment. Chunks come in order, so each part is added from its
    start."""
    cdef uint64_t begin = n * compartment(x), end = min(begin + compartment(x), x.adasum.starts[x.plan.count]), low, high, a, b
    cdef int32_t k = share_at(x, begin)
    cdef int me = x.rank, r
    cdef Piece* piece
    while k < x.plan.count and x.adasum.starts[k] < end:
        piece = &x.plan.pieces[k]
        low, high = max(begin, x.adasum.starts[k]), min(end, x.adasum.starts[k + 1])
        a, b = part_offset(x, k, me, low), part_offset(x, k, me, high)
        if a < b:
            for r in range(x.size):
                x.sources[r] = place(x, r, n, me) + (low - begin)
            if piece.source != NULL:
                x.sources[me] = piece.source + a
            x.kernels.inner(piece.dtype, x.adasum.lanes, x.sources, x.size, elements(x, piece, b - a))
        if low < high == x.adasum.starts[k + 1]:
            add_lanes(x, k)
        k += 1


cdef void add_lanes(Executor* x, int32_t k) noexcept nogil:
    """Finish the measurement of this rank's part of piece k: store one number for each pair, and clear the lanes."""
    cdef int32_t count = count_pairs(x), p
    cdef double* products = x.adasum.products + <uint64_t>k * <uint64_t>count
    cdef double* lane = x.adasum.lanes
    for p in range(count):
        products[p] = ((lane[0] + lane[1]) + (lane[2] + lane[3])) + ((lane[4] + lane[5]) + (lane[6] + lane[7]))
        lane += ENGINE_INNER_LANES
    memset(x.adasum.lanes, 0, <size_t>count * ENGINE_INNER_LANES * sizeof(double))


# ---- the sum of the products over ranks --------------------------------------------------------------------------------------

cdef inline uint64_t products_bytes(const Executor* x) noexcept nogil:
    return <uint64_t>x.plan.count * <uint64_t>count_pairs(x) * sizeof(double)


cdef inline uint64_t exchange_start(const Executor* x, uint64_t n, int rank) noexcept nogil:
    """Return where the products that `rank` sums begin in exchange chunk n, in bytes; rank `size` begins at the chunk's end."""
    cdef uint64_t nbytes = min(products_bytes(x) - n * SLOT_BYTES, <uint64_t>SLOT_BYTES)
    cdef uint64_t lines = (nbytes + PIECE_ALIGNMENT - 1) // PIECE_ALIGNMENT
    return min(lines * <uint64_t>rank // <uint64_t>x.size * PIECE_ALIGNMENT, nbytes)


cdef inline char* exchange_slot(const Executor* x, int rank, uint64_t n) noexcept nogil:
    return slot(x, rank, x.adasum.measured + n)


cdef void pack_exchange(Executor* x, uint64_t n) noexcept nogil:
    x.kernels.copy(exchange_slot(x, x.rank, n), <char*>x.adasum.products + n * SLOT_BYTES, exchange_start(x, n, x.size))


cdef void reduce_exchange(Executor* x, uint64_t n) noexcept nogil:
    cdef uint64_t low = exchange_start(x, n, x.rank), high = exchange_start(x, n, x.rank + 1)
    cdef uint64_t count = (high - low) // sizeof(double), i
    cdef double* sums = <double*>(<char*>x.adasum.products + n * SLOT_BYTES + low)
    cdef const double* brought
    cdef int r
    memset(sums, 0, high - low)
    for r in range(x.size):
        brought = <const double*>(exchange_slot(x, r, n) + low)
        for i in range(count):
            sums[i] += brought[i]
    x.kernels.copy(exchange_slot(x, x.rank, n) + low, sums, high - low)


cdef void copy_exchange(Executor* x, uint64_t n) noexcept nogil:
    cdef uint64_t low, high
    cdef int r
    for r in range(x.size):
        low, high = exchange_start(x, n, r), exchange_start(x, n, r + 1)
        if r != x.rank and low < high:
            x.kernels.copy(<char*>x.adasum.products + n * SLOT_BYTES + low, exchange_slot(x, r, n) + low, high - low)
    if x.adasum.measured + n + 1 == x.adasum.lead:
        weigh_ranks(x)


# ---- weights -----------------------------------------------------------------------------------------------------------------

cdef inline double get_product(const double* products, int size, int i, int j) noexcept nogil:
    """Return the inner product of the vectors of ranks i and j, which are stored as a triangle."""
    return products[i * size - i * (i - 1) // 2 + j - i] if i <= j else products[j * size - j * (j - 1) // 2 + i - j]


cdef double compute_coefficient(double both, double squared, double scale) noexcept nogil:
    """Return 1 - both / (2 squared); 1 if the squared norm is negligible beside `scale`. NaN stays NaN."""
    return 1.0 if squared <= CANCELLED * scale else 1.0 - both / (2.0 * squared)


cdef double inner_product(
    const double* products, const double* w, int size, int a, int b, int span, double* scale
) noexcept nogil:
    """Return the inner product of two vectors of the tree, of `span` ranks from `a` and from `b` on. `scale` gets the sum of the
    terms' magnitudes."""
    cdef double total = 0, term
    cdef int i, j
    scale[0] = 0
    for i in range(a, a + span):
        for j in range(b, b + span):
            term = w[i] * w[j] * get_product(products, size, i, j)
            total += term
            scale[0] += term if term > 0 else -term
    return total


cdef void weigh_tensor(const double* products, double* w, int size, double factor) noexcept nogil:
    """Compute the weight of each rank's vector in the tree's root, times `factor`."""
    cdef double left, right, both, scale_left, scale_right, scale
    cdef int span = 1, a, i
    for i in range(size):
        w[i] = 1.0
    while span < size:
        a = 0
        while a < size:
            left = inner_product(products, w, size, a, a, span, &scale_left)
            right = inner_product(products, w, size, a + span, a + span, span, &scale_right)
            both = inner_product(products, w, size, a, a + span, span, &scale)
            left = compute_coefficient(both, left, scale_left)
            right = compute_coefficient(both, right, scale_right)
            for i in range(span):
                w[a + i] *= left
                w[a + span + i] *= right
            a += 2 * span
        span *= 2
    for i in range(size):
        w[i] *= factor


cdef void weigh_ranks(Executor* x) noexcept nogil:
    cdef int32_t k
    for k in range(x.plan.count):
        weigh_tensor(x.adasum.products + k * count_pairs(x), x.adasum.weights + k * x.size, x.size, x.adasum.factor)


# ---- the stages --------------------------------------------------------------------------------------------------------------

cdef inline uint64_t begin_of(const Executor* x, uint64_t n) noexcept nogil:
    """Return the offset in the logical buffer of chunk n, which is one of the weighted sum."""
    return (n - x.adasum.lead) * x.chunk


cdef void pack(Executor* x, uint64_t n) noexcept nogil:
    if n < x.adasum.measured:
        pack_parts(x, n)
    elif n < x.adasum.lead:
        pack_exchange(x, n - x.adasum.measured)
    else:
        pack_parts_of_others(x, n, begin_of(x, n))


cdef void offer_chunk(Executor* x, Stage stage, uint64_t n) noexcept nogil:
    cdef uint64_t begin = n * compartment(x), k = n - x.adasum.measured
    cdef int r
    if n >= x.adasum.lead:
        offer_parts_to_others(x, stage, n, begin_of(x, n))
    elif n >= x.adasum.measured and stage == Stage.REDUCED:
        offer(x, -1, n, exchange_start(x, k, x.rank), exchange_start(x, k, x.rank + 1))
    elif stage == Stage.PACKED:
        for r in range(x.size):
            if n >= x.adasum.measured:
                offer(x, r, n, exchange_start(x, k, r), exchange_start(x, k, r + 1))
            else:
                offer(x, r, n, <uint64_t>r * compartment(x),
                      <uint64_t>r * compartment(x) + min(compartment(x), x.adasum.starts[x.plan.count] - begin))


cdef void reduce(Executor* x, uint64_t n) noexcept nogil:
    if n < x.adasum.measured:
        measure_parts(x, n)
    elif n < x.adasum.lead:
        reduce_exchange(x, n - x.adasum.measured)
    else:
        weigh_part(x, n, begin_of(x, n))


cdef void copy(Executor* x, uint64_t n) noexcept nogil:
    if n < x.adasum.lead:
        copy_exchange(x, n - x.adasum.measured)
    else:
        copy_parts_of_others(x, n, begin_of(x, n))


cdef void weigh_part(Executor* x, uint64_t n, uint64_t begin) noexcept nogil:
    """Write the weighted sum of all ranks' tensors, in this rank's part of chunk n, to its tensors and its slot."""
    cdef uint64_t end = chunk_end(x, begin)
    cdef Cut cut = cut_range(&x.plan, part_start(x, begin, end, x.rank), part_start(x, begin, end, x.rank + 1))
    cdef char* target
    find_slots(x, n)
    while next_piece(&x.plan, &cut):
        find_sources(x, &cut, begin)
        target = cut.piece.target + offset(x, cut.piece, cut.low)
        x.kernels.weigh(cut.piece.dtype, target, x.sources, x.adasum.weights + cut.k * x.size, x.size,
                        elements(x, cut.piece, cut.high - cut.low))
        if x.size > 1:
            x.kernels.copy(x.slots[x.rank] + (cut.low - begin), target, cut.high - cut.low)
