"""The arena: one sparse memfd of all ranks, mapped region by region. Every rank maps every rank's part.

A place is (region << 40 | offset in a part), so it is the same number on every rank.
"""
from libc.errno cimport ENOMEM, errno
from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy, memset

from engine_ext.platform.posix cimport (
    MADV_HUGEPAGE, MADV_POPULATE_WRITE, MAP_ANONYMOUS, MAP_FAILED, MAP_FIXED, MAP_NORESERVE, MAP_PRIVATE, MAP_SHARED,
    MREMAP_FIXED, MREMAP_MAYMOVE, PAGE, PROT_READ, PROT_WRITE, close, ftruncate, madvise, mmap, mremap, munmap,
)


cdef void arena_open(Arena* arena, int fd, int rank, int size) noexcept nogil:
    """Initialize an arena without regions, which owns `fd` from now on."""
    memset(arena, 0, sizeof(Arena))
    arena.fd, arena.rank, arena.size = fd, rank, size


cdef inline uint64_t part_bytes(uint64_t nbytes) noexcept nogil:
    """Return `nbytes` rounded up to whole pages."""
    return (nbytes + PAGE - 1) // PAGE * PAGE


cdef int arena_grow(Arena* arena, uint64_t nbytes) noexcept nogil:
    """Make the file long enough for the next region; 0 or -errno. One rank does it, before the others map."""
    if ftruncate(arena.fd, <long>(arena.end + part_bytes(nbytes) * <uint64_t>arena.size)) != 0:
        return -errno
    return 0


cdef int arena_map(Arena* arena, uint64_t nbytes) noexcept nogil:
    """Map the next region's parts of all ranks; return the region's index, or -errno."""
    cdef uint64_t part = part_bytes(nbytes)
    cdef Region* region
    cdef void* base
    cdef int r
    if arena.count == arena.room:
        region = <Region*>realloc(arena.regions, (arena.room * 2 + 8) * sizeof(Region))
        if region == NULL:
            return -ENOMEM
        arena.regions, arena.room = region, arena.room * 2 + 8
    region = &arena.regions[arena.count]
    region.part, region.begin, region.shared = part, arena.end, True
    region.bases = <char**>malloc(arena.size * sizeof(char*))
    if region.bases == NULL:
        return -ENOMEM
    for r in range(arena.size):
        base = mmap(NULL, part, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, arena.fd,
                    <long>(arena.end + part * <uint64_t>r))
        if base == MAP_FAILED:
            r -= 1
            while r >= 0:
                munmap(region.bases[r], part)
                r -= 1
            free(region.bases)
            return -errno
        madvise(base, part, MADV_HUGEPAGE)      # takes effect where the host allows it
        region.bases[r] = <char*>base
    arena.end += part * <uint64_t>arena.size
    arena.count += 1
    return arena.count - 1


cdef void arena_populate_own(const Arena* arena, int region) noexcept nogil:
    """Allocate the pages of this rank's part now, not in the first step, and before other ranks make page tables for them."""
    madvise(arena.regions[region].bases[arena.rank], arena.regions[region].part, MADV_POPULATE_WRITE)


cdef void arena_populate_share(const Arena* arena, int region) noexcept nogil:
    """Make page tables for what this rank writes in the parts of all ranks: the share that it reduces. All ranks have allocated
    their pages. Page tables for whole parts would cost as much as its own part's, for each rank.

    Rank 0 has the first share of a batch, which is the end of the region, since the last parameters' gradients come first. If
    the batches are cut differently, the first step faults in what is missing.
    """
    cdef char** bases = arena.regions[region].bases
    cdef uint64_t pages = arena.regions[region].part // PAGE, size = <uint64_t>arena.size, rank = <uint64_t>arena.rank
    cdef uint64_t begin = pages * (size - 1 - rank) // size * PAGE, end = pages * (size - rank) // size * PAGE
    cdef int r
    if end > begin:
        for r in range(arena.size):
            madvise(bases[r] + begin, end - begin, MADV_POPULATE_WRITE)


cdef int64_t arena_locate(Arena* arena, const char* address, uint64_t nbytes) noexcept nogil:
    """Return the place of memory in this rank's part; -1: it does not lie there."""
    cdef Region* region
    cdef int k
    for k in range(arena.count):
        region = &arena.regions[k]
        if region.shared and region.bases[arena.rank] <= address and (
                address + nbytes <= region.bases[arena.rank] + region.part):
            return <int64_t>k << 40 | <int64_t>(address - region.bases[arena.rank])
    return -1


cdef void privatise_region(Arena* arena, Region* region) noexcept nogil:
    """Replace this rank's part by a private copy, and unmap the others' parts. Without memory for it the part stays shared."""
    cdef char* own = region.bases[arena.rank]
    cdef void* copy = mmap(NULL, region.part, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
    cdef int r
    if copy != MAP_FAILED:
        memcpy(copy, own, region.part)
        mremap(copy, region.part, region.part, MREMAP_MAYMOVE | MREMAP_FIXED, <void*>own)
    region.shared = False
    for r in range(arena.size):
        if r != arena.rank:
            munmap(region.bases[r], region.part)


cdef void arena_privatise(Arena* arena) noexcept nogil:
    """Put private copies at the same addresses, and unmap the others' parts: a rank of a failed world may still write."""
    cdef int k
    for k in range(arena.count):
        if arena.regions[k].shared:
            privatise_region(arena, &arena.regions[k])


cdef void arena_forked(Arena* arena) noexcept nogil:
    """Make the parts private in a forked child, which calls this at once: shared mappings are not copied on write. From now on
    the child's writes are its own, and it cannot reach the parts of other ranks."""
    cdef Region* region
    cdef int k, r
    for k in range(arena.count):
        region = &arena.regions[k]
        if not region.shared:
            continue
        region.shared = False
        for r in range(arena.size):
            if r == arena.rank:
                mmap(region.bases[r], region.part, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, arena.fd,
                     <long>(region.begin + region.part * <uint64_t>r))
            else:
                munmap(region.bases[r], region.part)


cdef void arena_close(Arena* arena) noexcept nogil:
    """Close the file. This rank's parts stay mapped, as private memory, for views that still exist; arena_unmap frees them."""
    cdef int k
    arena_privatise(arena)
    for k in range(arena.count):
        free(arena.regions[k].bases)
    free(arena.regions)
    if arena.fd >= 0:
        close(arena.fd)
    memset(arena, 0, sizeof(Arena))
    arena.fd = -1


cdef void arena_unmap(char* base, uint64_t nbytes) noexcept nogil:
    """Unmap this rank's part of a region of a closed arena, once no view of it exists."""
    munmap(base, part_bytes(nbytes))
