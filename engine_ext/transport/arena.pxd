"""Tensors that live in memory shared by all ranks of a host, at the same place in each rank's part."""
from libc.stdint cimport int64_t, uint64_t

cdef struct Region:
    uint64_t part           # bytes of one rank's part, whole pages
    uint64_t begin          # of rank 0's part, in the file
    char** bases            # by rank; own is never unmapped here
    bint shared             # False once the parts are private

cdef struct Arena:
    int fd
    int rank
    int size
    int count
    int room
    Region* regions
    uint64_t end            # of the file

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
    return arena.regions[place >> 40].bases[rank] + (place & ((<int64_t>1 << 40) - 1))
