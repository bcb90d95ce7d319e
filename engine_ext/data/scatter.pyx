"""Reduce-scatter and all-to-all: what goes to one rank alone.

A chunk has a compartment for every rank, all of one size: compartment r of the chunk in rank s's slot is what s has for r. So
each chunk is work for every rank, however unevenly the rows are split.

All-to-all begins with a chunk in which every rank says how many rows it has for each. From these all ranks know how many chunks
follow, and each allocates what it will receive.
"""
from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport malloc
from libc.string cimport memcpy

from engine_ext.control.layout cimport segment_slot
from engine_ext.data.executor cimport Executor
from engine_ext.data.plan cimport PIECE_ALIGNMENT, Piece


cdef inline uint64_t compartment(const Executor* x) noexcept nogil:
    """Bytes for one rank in a chunk."""
    return x.chunk // <uint64_t>x.segment.size // PIECE_ALIGNMENT * PIECE_ALIGNMENT


cdef inline char* place(const Executor* x, int owner, uint64_t n, int reader) noexcept nogil:
    """What `owner` has for `reader` in chunk n."""
    return segment_slot(x.segment.header, owner, x.first + n) + <uint64_t>reader * compartment(x)


cdef inline uint64_t left(const Executor* x, uint64_t total, uint64_t begin) noexcept nogil:
    """Bytes of a total that are in the compartment that begins at `begin` of it."""
    return 0 if begin >= total else min(compartment(x), total - begin)


cdef uint64_t scatter_chunks(const Executor* x) noexcept nogil:
    """Chunks of a reduce-scatter: those of the longest part."""
    cdef uint64_t longest = 0
    cdef int r
    for r in range(x.segment.size):
        longest = max(longest, x.send_bytes[r])
    return (longest + compartment(x) - 1) // compartment(x)


# ---- reduce-scatter: `send` is the part of each rank in the source, in bytes that travel -------------------------------------

cdef void pack_scatter(Executor* x, uint64_t n) noexcept nogil:
    cdef Piece* piece = &x.plan.pieces[0]
    cdef uint64_t begin = n * compartment(x), nbytes
    cdef int r
    for r in range(x.segment.size):
        nbytes = left(x, x.send_bytes[r], begin)
        if nbytes and r != x.segment.rank:
            x.kernels.pack(x.reduction.dtype, x.reduction.tensor, x.reduction.prescale, x.streaming,
                           place(x, x.segment.rank, n, r), piece.source + (x.send_start[r] + begin) * x.ratio,
                           nbytes // x.element)


cdef void reduce_scatter(Executor* x, uint64_t n) noexcept nogil:
    cdef Piece* piece = &x.plan.pieces[0]
    cdef int me = x.segment.rank, r
    cdef uint64_t begin = n * compartment(x), nbytes = left(x, x.send_bytes[me], begin)
    if nbytes == 0:
        return
    for r in range(x.segment.size):
        x.sources[r] = place(x, r, n, me)
    x.sources[me] = piece.source + (x.send_start[me] + begin) * x.ratio
    x.targets[0] = piece.target + begin * x.ratio
    x.reduction.copies, x.reduction.unscaled = 1, me
    x.kernels.reduce(&x.reduction, x.sources, <void* const*>x.targets, nbytes // x.element)


# ---- all-to-all: `send` is this rank's source, `gather` its result -----------------------------------------------------------

cdef void pack_exchange(Executor* x, uint64_t n) noexcept nogil:
    cdef uint64_t begin, nbytes
    cdef int r
    if n == 0:
        memcpy(segment_slot(x.segment.header, x.segment.rank, x.first), x.rows_sent, <size_t>x.segment.size * 8)
        return
    begin = (n - 1) * compartment(x)
    for r in range(x.segment.size):
        nbytes = left(x, x.send_bytes[r], begin)
        if nbytes and r != x.segment.rank:
            x.kernels.copy(place(x, x.segment.rank, n, r), x.plan.pieces[0].source + x.send_start[r] + begin, nbytes)


cdef void begin_exchange(Executor* x) noexcept nogil:
    """Every rank has said what it sends: find out what comes, and make room for it."""
    cdef const int64_t* sent
    cdef uint64_t longest = 0, total = 0
    cdef int r, s
    for s in range(x.segment.size):
        sent = <const int64_t*>segment_slot(x.segment.header, s, x.first)
        for r in range(x.segment.size):
            longest = max(longest, <uint64_t>sent[r] * x.row_bytes)
        x.rows_received[s] = sent[x.segment.rank]
        x.gather_bytes[s], x.gather_start[s] = <uint64_t>sent[x.segment.rank] * x.row_bytes, total
        total += x.gather_bytes[s]
    x.received = <char*>malloc(max(total, <uint64_t>1))
    x.end += (longest + compartment(x) - 1) // compartment(x)


cdef void copy_exchange(Executor* x, uint64_t n) noexcept nogil:
    cdef int me = x.segment.rank, s
    cdef uint64_t begin, nbytes
    if n == 0:
        begin_exchange(x)
        return
    if x.received == NULL:          # no memory: said at the end, so that the other ranks are not kept waiting
        return
    begin = (n - 1) * compartment(x)
    for s in range(x.segment.size):
        nbytes = left(x, x.gather_bytes[s], begin)
        if nbytes:
            x.kernels.copy(x.received + x.gather_start[s] + begin,
                           place(x, s, n, me) if s != me else x.plan.pieces[0].source + x.send_start[me] + begin, nbytes)
