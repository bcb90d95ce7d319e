"""Reduce-scatter and all-to-all: what goes to one rank alone.

A chunk has a compartment for every rank, all of one size: compartment r of the chunk in rank s's slot is what s has for r. So
each chunk is work for every rank, however unevenly the rows are split.

All-to-all begins with a chunk in which every rank says how many rows it has for each. From these all ranks know how many chunks
follow, and each allocates what it will receive.
"""
from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport malloc
from libc.string cimport memcpy

from engine_ext.data.executor cimport Executor, slot


cdef inline uint64_t left(const Executor* x, uint64_t total, uint64_t begin) noexcept nogil:
    """Bytes of a total that are in the compartment that begins at `begin` of it."""
    return 0 if begin >= total else min(compartment(x), total - begin)


cdef uint64_t scatter_chunks(const Executor* x) noexcept nogil:
    """Chunks of a reduce-scatter: those of the longest part."""
    cdef uint64_t longest = 0
    cdef int r
    for r in range(x.size):
        longest = max(longest, x.send_bytes[r])
    return (longest + compartment(x) - 1) // compartment(x)


# ---- reduce-scatter: the logical buffer is the part of rank 0 of every tensor, then that of rank 1, and so on --------------

cdef uint64_t scatter_compartment(const Executor* x, int rank) noexcept nogil:
    """Where in a slot what is for `rank` begins."""
    return <uint64_t>rank * compartment(x)


cdef void scatter_window(const Executor* x, uint64_t n, int rank, uint64_t* low, uint64_t* high) noexcept nogil:
    """What of the part of `rank` is in chunk n: [low, high) of the logical buffer."""
    low[0] = x.send_start[rank] + n * compartment(x)
    high[0] = low[0] + left(x, x.send_bytes[rank], n * compartment(x))


# ---- all-to-all: `send` is this rank's source, `gather` its result -----------------------------------------------------------

cdef void pack_exchange(Executor* x, uint64_t n) noexcept nogil:
    cdef uint64_t begin, nbytes
    cdef int r
    if n == 0:
        memcpy(slot(x, x.rank, 0), x.rows_sent, <size_t>x.size * 8)
        return
    begin = (n - 1) * compartment(x)
    for r in range(x.size):
        nbytes = left(x, x.send_bytes[r], begin)
        if nbytes and r != x.rank:
            x.kernels.copy(place(x, x.rank, n, r), x.plan.pieces[0].source + x.send_start[r] + begin, nbytes)


cdef void begin_exchange(Executor* x) noexcept nogil:
    """Every rank has said what it sends: find out what comes, and make room for it."""
    cdef const int64_t* sent
    cdef uint64_t longest = 0, total = 0
    cdef int r, s
    for s in range(x.size):
        sent = <const int64_t*>slot(x, s, 0)
        for r in range(x.size):
            longest = max(longest, <uint64_t>sent[r] * x.row_bytes)
        x.rows_received[s] = sent[x.rank]
        x.gather_bytes[s], x.gather_start[s] = <uint64_t>sent[x.rank] * x.row_bytes, total
        total += x.gather_bytes[s]
    x.received = <char*>malloc(max(total, <uint64_t>1))
    x.end += (longest + compartment(x) - 1) // compartment(x)


cdef void copy_exchange(Executor* x, uint64_t n) noexcept nogil:
    cdef int me = x.rank, s
    cdef uint64_t begin, nbytes
    if n == 0:
        begin_exchange(x)
        return
    if x.received == NULL:          # no memory: said at the end, so that the other ranks are not kept waiting
        return
    begin = (n - 1) * compartment(x)
    for s in range(x.size):
        nbytes = left(x, x.gather_bytes[s], begin)
        if nbytes:
            x.kernels.copy(x.received + x.gather_start[s] + begin,
                           place(x, s, n, me) if s != me else x.plan.pieces[0].source + x.send_start[me] + begin, nbytes)
