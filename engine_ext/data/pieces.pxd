"""The fusion plan's pieces in a chunk: to a slot, from a slot, and reduced on the way. Where in a chunk things lie."""
from libc.stdint cimport uint64_t

from engine_ext.data.executor cimport Executor, slot
from engine_ext.data.plan cimport PIECE_ALIGNMENT, Cut

cdef void pack_range(Executor* x, char* into, uint64_t begin, uint64_t low, uint64_t high) noexcept nogil
cdef void copy_range(Executor* x, const char* out, uint64_t begin, uint64_t low, uint64_t high) noexcept nogil
cdef void identity_of_absent(Executor* x, char* into, uint64_t begin, uint64_t low, uint64_t high) noexcept nogil
cdef void reduce_range(Executor* x, uint64_t n, uint64_t begin, uint64_t low, uint64_t high, int copies) noexcept nogil
cdef void find_slots(Executor* x, uint64_t n) noexcept nogil
cdef void find_sources(Executor* x, const Cut* cut, uint64_t begin) noexcept nogil

# ---- a chunk of the logical buffer, cut into a part for every rank: what it reduces ------------------------------------------

cdef inline uint64_t chunk_end(const Executor* x, uint64_t begin) noexcept nogil:
    return min(begin + x.chunk, x.plan.total)

cdef inline uint64_t share_start(uint64_t begin, uint64_t end, int k, int count) noexcept nogil:
    """Where share k of [begin, end), cut into `count`, begins; that of share `count` is the end. No two are in one cache line."""
    cdef uint64_t lines = (end - begin + PIECE_ALIGNMENT - 1) // PIECE_ALIGNMENT
    return min(begin + lines * <uint64_t>k // <uint64_t>count * PIECE_ALIGNMENT, end)

cdef inline uint64_t part_start(const Executor* x, uint64_t begin, uint64_t end, int rank) noexcept nogil:
    """Where the part of `rank` begins; that of rank `size` is the end."""
    return share_start(begin, end, rank, x.size)

# ---- a chunk with a compartment for every rank, all of one size: compartment r of rank s's slot is what s has for r ----------

cdef inline uint64_t compartment(const Executor* x) noexcept nogil:
    """Bytes for one rank in a chunk."""
    return x.chunk // <uint64_t>x.size // PIECE_ALIGNMENT * PIECE_ALIGNMENT

cdef inline char* place(const Executor* x, int owner, uint64_t n, int reader) noexcept nogil:
    """What `owner` has for `reader` in chunk n."""
    return slot(x, owner, n) + <uint64_t>reader * compartment(x)

cdef inline uint64_t in_compartment(const Executor* x, uint64_t total, uint64_t begin) noexcept nogil:
    """Bytes of a total that are in the compartment that begins at `begin` of it."""
    return 0 if begin >= total else min(compartment(x), total - begin)
