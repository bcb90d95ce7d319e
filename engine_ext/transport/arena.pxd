"""Tensors that live in memory shared by all ranks of a host, at the same place in each rank's part."""
from libc.stdint cimport int64_t, uint64_t

cdef struct Region:
    uint64_t part           # bytes of one rank's part, whole pages
    uint64_t begin          # offset of rank 0's part in the file; the other parts follow
    char** bases            # by rank: address of its part; this rank's own is unmapped only by arena_unmap
    bint shared             # whether the parts are shared; False once this rank's is private and the others are unmapped

cdef struct Arena:
    int fd
    int rank
    int size
    int count               # number of regions
    int room                # capacity of `regions`
    Region* regions
    uint64_t end            # bytes of the file in use

cdef void arena_open(Arena* arena, int fd, int rank, int size) noexcept nogil
cdef int arena_grow(Arena* arena, uint64_t nbytes) noexcept nogil
cdef int arena_map(Arena* arena, uint64_t nbytes) noexcept nogil
cdef void arena_populate_own(const Arena* arena, int region) noexcept nogil
cdef void arena_populate_share(const Arena* arena, int region) noexcept nogil
cdef int64_t arena_locate(Arena* arena, const char* address, uint64_t nbytes) noexcept nogil
cdef void arena_privatise(Arena* arena) noexcept nogil
cdef void arena_forked(Arena* arena) noexcept nogil
cdef void arena_close(Arena* arena) noexcept nogil
cdef void arena_unmap(char* base, uint64_t nbytes) noexcept nogil

cdef inline char* arena_address(Arena* arena, int64_t place, int rank) noexcept nogil:
    """Return the address, in this process, of a place in the part of `rank`."""
    return arena.regions[place >> 40].bases[rank] + (place & ((<int64_t>1 << 40) - 1))
