"""Reduce-scatter and all-to-all: what goes to one rank alone."""
from libc.stdint cimport uint64_t

from engine_ext.data.executor cimport Executor, slot
from engine_ext.data.plan cimport PIECE_ALIGNMENT

cdef uint64_t scatter_chunks(const Executor* x) noexcept nogil
cdef uint64_t scatter_compartment(const Executor* x, int rank) noexcept nogil
cdef void scatter_window(const Executor* x, uint64_t n, int rank, uint64_t* low, uint64_t* high) noexcept nogil
cdef void pack_exchange(Executor* x, uint64_t n) noexcept nogil
cdef void copy_exchange(Executor* x, uint64_t n) noexcept nogil


cdef inline uint64_t compartment(const Executor* x) noexcept nogil:
    """Bytes for one rank in a chunk."""
    return x.chunk // <uint64_t>x.size // PIECE_ALIGNMENT * PIECE_ALIGNMENT


cdef inline char* place(const Executor* x, int owner, uint64_t n, int reader) noexcept nogil:
    """What `owner` has for `reader` in chunk n."""
    return slot(x, owner, n) + <uint64_t>reader * compartment(x)
