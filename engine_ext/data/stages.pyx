"""Pack, reduce and copy of one chunk. `n` counts from the entry's first chunk.

Slots are shared memory; tensors are this rank's own, except in the arena. Rank r owns part r of a chunk: a multiple of 64
bytes, so parts never share a cache line. Whoever owns an element adds the ranks' values in rank order (I7).
"""
from libc.stdint cimport int32_t, uint64_t
from libc.string cimport memcpy

from engine_ext.data.adasum cimport copy_products, pack_products, reduce_products
from engine_ext.data.executor cimport elements, offset, slot
from engine_ext.data.plan cimport PIECE_ALIGNMENT, Piece, plan_find
from engine_ext.data.scatter cimport copy_exchange, pack_exchange, scatter_compartment, scatter_window
from engine_ext.kernels.identity cimport fill_identity
from engine_ext.kernels.kernels cimport ENGINE_EVERY_SOURCE, ENGINE_NO_SOURCE
from engine_ext.shared.layout cimport (
    ALGORITHM_ADASUM, ALGORITHM_ONE_SHOT, ALGORITHM_SHARED, KIND_ALLGATHER, KIND_ALLTOALL, KIND_BROADCAST,
    KIND_REDUCESCATTER,
)
from engine_ext.transport.arena cimport arena_address


cdef inline uint64_t chunk_end(const Executor* x, uint64_t begin) noexcept nogil:
    return min(begin + x.chunk, x.plan.total)


cdef inline uint64_t part_start(const Executor* x, uint64_t begin, uint64_t end, int rank) noexcept nogil:
    """Where the part of `rank` begins; that of rank `size` is the end."""
    cdef uint64_t lines = (end - begin + PIECE_ALIGNMENT - 1) // PIECE_ALIGNMENT
    return min(begin + lines * <uint64_t>rank // <uint64_t>x.size * PIECE_ALIGNMENT, end)


cdef void pack_range(Executor* x, char* into, uint64_t begin, uint64_t low, uint64_t high) noexcept nogil:
    """Copy [low, high) of the logical buffer to the slot `into`, which holds it from `begin` on; scale and cast on the way."""
    cdef int32_t k = plan_find(&x.plan, low)
    cdef Piece* piece
    cdef uint64_t a, b
    while k < x.plan.count and x.plan.pieces[k].start < high:
        piece = &x.plan.pieces[k]
        a, b = max(low, piece.start), min(high, piece.start + piece.nbytes)
        if a < b:
            if piece.source == NULL:
                fill_identity(into + (a - begin), piece.wire, x.reduction.op, elements(x, piece, b - a))
            else:
                x.kernels.pack(piece.wire, piece.dtype, x.reduction.prescale, x.streaming, into + (a - begin),
                               piece.source + offset(x, piece, a), elements(x, piece, b - a))
        k += 1


cdef void copy_range(Executor* x, const char* out, uint64_t begin, uint64_t low, uint64_t high) noexcept nogil:
    """Copy [low, high) of the logical buffer from the slot `out` to the tensors."""
    cdef int32_t k = plan_find(&x.plan, low)
    cdef Piece* piece
    cdef uint64_t a, b
    while k < x.plan.count and x.plan.pieces[k].start < high:
        piece = &x.plan.pieces[k]
        a, b = max(low, piece.start), min(high, piece.start + piece.nbytes)
        if a < b:
            x.kernels.unpack(piece.wire, piece.dtype, piece.target + offset(x, piece, a), out + (a - begin),
                             elements(x, piece, b - a))
        k += 1


cdef void identity_of_absent(Executor* x, char* into, uint64_t begin, uint64_t low, uint64_t high) noexcept nogil:
    """The part that this rank reduces itself: what it does not have must lie in its slot too."""
    cdef int32_t k = plan_find(&x.plan, low)
    cdef Piece* piece
    cdef uint64_t a, b
    while k < x.plan.count and x.plan.pieces[k].start < high:
        piece = &x.plan.pieces[k]
        a, b = max(low, piece.start), min(high, piece.start + piece.nbytes)
        if a < b and piece.source == NULL:
            fill_identity(into + (a - begin), piece.wire, x.reduction.op, elements(x, piece, b - a))
        k += 1


cdef void pack_shared(Executor* x) noexcept nogil:
    cdef Piece* piece
    cdef int32_t k
    if x.needs_pack:
        for k in range(x.plan.count):
            piece = &x.plan.pieces[k]
            if piece.source == NULL:
                fill_identity(arena_address(x.arena, piece.shared, x.rank), piece.dtype, x.reduction.op,
                              elements(x, piece, piece.nbytes))


cdef void pack_gather(Executor* x, uint64_t n) noexcept nogil:
    """Offer the next chunk of this rank's rows, and put it where it belongs in the own result."""
    cdef uint64_t begin = n * x.chunk, end = chunk_end(x, begin)
    if begin >= end:
        return
    if x.size > 1:
        pack_range(x, slot(x, x.rank, n), begin, begin, end)
    pack_range(x, x.gathered + x.gather_start[x.rank] + begin, begin, begin, end)


cdef void pack_scatter(Executor* x, uint64_t n) noexcept nogil:
    """Offer every other rank the next of its part."""
    cdef uint64_t low, high
    cdef int r
    for r in range(x.size):
        scatter_window(x, n, r, &low, &high)
        if low < high and r == x.rank:
            identity_of_absent(x, slot(x, r, n) + scatter_compartment(x, r), low, low, high)
        elif low < high:
            pack_range(x, slot(x, x.rank, n) + scatter_compartment(x, r), low, low, high)


cdef void pack_chunk(Executor* x, uint64_t n) noexcept nogil:
    cdef uint64_t begin = (n - x.lead) * x.chunk, end, low, high
    cdef char* into
    if n < x.lead:
        pack_products(x, n)
        return
    if x.algorithm == ALGORITHM_SHARED:
        pack_shared(x)
        return
    if x.kind == KIND_ALLGATHER:
        pack_gather(x, n)
        return
    if x.kind == KIND_REDUCESCATTER:
        pack_scatter(x, n)
        return
    if x.kind == KIND_ALLTOALL:
        pack_exchange(x, n)
        return
    end = chunk_end(x, begin)
    into = slot(x, x.rank, n)
    if x.kind == KIND_BROADCAST:
        if x.rank == x.root and x.size > 1:
            pack_range(x, into, begin, begin, end)
    elif x.algorithm == ALGORITHM_ONE_SHOT:
        pack_range(x, into, begin, begin, end)
    else:
        low = part_start(x, begin, end, x.rank)
        high = part_start(x, begin, end, x.rank + 1)
        if begin < low:
            pack_range(x, into, begin, begin, low)
        if high < end:
            pack_range(x, into, begin, high, end)
        if x.needs_pack and low < high:
            identity_of_absent(x, into, begin, low, high)


cdef void reduce_shared(Executor* x, uint64_t low, uint64_t high) noexcept nogil:
    cdef int32_t k = plan_find(&x.plan, low)
    cdef int me = x.rank, r, t
    cdef Piece* piece
    cdef uint64_t a, b
    x.reduction.unscaled = ENGINE_EVERY_SOURCE
    x.reduction.copies = x.size
    while k < x.plan.count and x.plan.pieces[k].start < high:
        piece = &x.plan.pieces[k]
        a, b = max(low, piece.start), min(high, piece.start + piece.nbytes)
        if a < b:
            x.targets[0] = arena_address(x.arena, piece.shared, me) + (a - piece.start)
            t = 1
            for r in range(x.size):
                x.sources[r] = arena_address(x.arena, piece.shared, r) + (a - piece.start)
                if r != me:
                    x.targets[t] = <void*>x.sources[r]
                    t += 1
            x.reduction.dtype, x.reduction.tensor = piece.wire, piece.dtype
            x.kernels.reduce(&x.reduction, x.sources, <void* const*>x.targets, elements(x, piece, b - a))
        k += 1


cdef void reduce_range(Executor* x, uint64_t n, uint64_t begin, uint64_t low, uint64_t high, int copies) noexcept nogil:
    """Reduce [low, high) into the tensors and, with two copies, into this rank's slot. The slots hold it from `begin` on."""
    cdef int32_t k = plan_find(&x.plan, low)
    cdef int me = x.rank, r
    cdef Piece* piece
    cdef uint64_t a, b
    x.reduction.copies = copies
    while k < x.plan.count and x.plan.pieces[k].start < high:
        piece = &x.plan.pieces[k]
        a, b = max(low, piece.start), min(high, piece.start + piece.nbytes)
        if a < b:
            for r in range(x.size):
                x.sources[r] = slot(x, r, n) + (a - begin)
            if piece.source != NULL:
                x.sources[me] = piece.source + offset(x, piece, a)
            x.reduction.unscaled = me if piece.source != NULL else ENGINE_NO_SOURCE
            x.targets[0] = piece.target + offset(x, piece, a)
            if copies > 1:
                x.targets[1] = slot(x, me, n) + (a - begin)
            if x.algorithm == ALGORITHM_ADASUM:
                x.kernels.weigh(piece.dtype, x.targets[0], x.sources, x.adasum.weights + k * x.size,
                                x.size, elements(x, piece, b - a))
                if copies > 1:
                    x.kernels.copy(x.targets[1], x.targets[0], b - a)
            else:
                x.reduction.dtype, x.reduction.tensor = piece.wire, piece.dtype
                x.kernels.reduce(&x.reduction, x.sources, <void* const*>x.targets, elements(x, piece, b - a))
        k += 1


cdef void reduce_chunk(Executor* x, uint64_t n) noexcept nogil:
    cdef uint64_t begin = (n - x.lead) * x.chunk, end = chunk_end(x, begin), low, high
    if n < x.lead:
        reduce_products(x, n)
        return
    if x.kind == KIND_REDUCESCATTER:
        scatter_window(x, n, x.rank, &low, &high)
        if low < high:
            reduce_range(x, n, low - scatter_compartment(x, x.rank), low, high, 1)
        return
    if x.algorithm == ALGORITHM_ONE_SHOT:
        reduce_range(x, n, begin, begin, end, 1)
        return
    low = part_start(x, begin, end, x.rank)
    high = part_start(x, begin, end, x.rank + 1)
    if low >= high:
        return
    if x.algorithm == ALGORITHM_SHARED:
        reduce_shared(x, low, high)
    else:
        reduce_range(x, n, begin, low, high, 2 if x.size > 1 else 1)


cdef void copy_broadcast(Executor* x, uint64_t n) noexcept nogil:
    cdef uint64_t begin = n * x.chunk, end = chunk_end(x, begin), a, b
    cdef Piece* piece
    cdef int32_t k
    if x.rank != x.root:
        copy_range(x, slot(x, x.root, n), begin, begin, end)
        return
    k = plan_find(&x.plan, begin)
    while k < x.plan.count and x.plan.pieces[k].start < end:
        piece = &x.plan.pieces[k]
        a, b = max(begin, piece.start), min(end, piece.start + piece.nbytes)
        if a < b and piece.source != piece.target:
            memcpy(piece.target + (a - piece.start), piece.source + (a - piece.start), b - a)
        k += 1


cdef void copy_chunk(Executor* x, uint64_t n) noexcept nogil:
    cdef uint64_t begin = (n - x.lead) * x.chunk, end, low, high
    cdef int r
    if n < x.lead:
        copy_products(x, n)
        return
    if x.algorithm == ALGORITHM_SHARED:
        return                  # the wait was all: every rank has written its part into this rank's tensors
    if x.kind == KIND_BROADCAST:
        copy_broadcast(x, n)
        return
    if x.kind == KIND_ALLTOALL:
        copy_exchange(x, n)
        return
    for r in range(x.size):
        if r == x.rank:
            continue
        if x.kind == KIND_ALLGATHER:
            if begin < x.gather_bytes[r]:
                x.kernels.copy(x.gathered + x.gather_start[r] + begin, slot(x, r, n),
                               min(x.chunk, x.gather_bytes[r] - begin))
        else:
            end = chunk_end(x, begin)
            low, high = part_start(x, begin, end, r), part_start(x, begin, end, r + 1)
            if low < high:
                copy_range(x, slot(x, r, n) , begin, low, high)
