"""Make, map and leave the control segment; declare a world failed."""
from libc.errno cimport ENOMEM, EPROTO, errno
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset, strncpy

from engine_ext.control.layout cimport (
    ENGINE_LAYOUT, ENGINE_PROTOCOL, REASON_BYTES, SEGMENT_MAGIC, rank_page, segment_bytes, segment_coordinator,
    segment_header, segment_page, segment_ring,
)
from engine_ext.platform.atomics cimport add32, cas, cas32, futex_wake, store32_release

cdef extern from "<sys/mman.h>" nogil:
    enum: PROT_READ, PROT_WRITE, MAP_SHARED, MAP_NORESERVE, MADV_DONTFORK, MFD_CLOEXEC
    void* MAP_FAILED
    int memfd_create(const char* name, unsigned int flags)
    void* mmap(void* addr, size_t length, int prot, int flags, int fd, long offset)
    int munmap(void* addr, size_t length)
    int madvise(void* addr, size_t length, int advice)

cdef extern from "<unistd.h>" nogil:
    int ftruncate(int fd, long length)
    int close(int fd)


cdef int segment_create(int size, uint32_t generation) noexcept nogil:
    """A new control segment for `size` ranks: its descriptor, or -errno."""
    cdef int fd = memfd_create(b"engine-control", MFD_CLOEXEC)
    if fd < 0:
        return -errno
    cdef segment_header* header
    cdef uint64_t bytes = segment_bytes(<uint32_t>size)
    if ftruncate(fd, <long>bytes) != 0:
        close(fd)
        return -errno
    header = <segment_header*>mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0)
    if <void*>header == MAP_FAILED:
        close(fd)
        return -errno
    header.magic, header.layout, header.bytes = SEGMENT_MAGIC, ENGINE_LAYOUT, bytes
    header.protocol, header.size, header.generation = ENGINE_PROTOCOL, <uint32_t>size, generation
    munmap(header, 4096)
    return fd


cdef int segment_map(Segment* segment, int fd, int rank, int size) noexcept nogil:
    """Map the segment behind `fd`: 0, -errno, or -EPROTO when it is of another layout or world."""
    cdef uint64_t bytes = segment_bytes(<uint32_t>size)
    cdef void* base
    cdef segment_header* header
    cdef int r
    memset(segment, 0, sizeof(Segment))
    base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0)
    if base == MAP_FAILED:
        return -errno
    header = <segment_header*>base
    if (header.magic != SEGMENT_MAGIC or header.layout != ENGINE_LAYOUT or header.bytes != bytes
            or header.protocol != ENGINE_PROTOCOL or header.size != <uint32_t>size):
        munmap(base, bytes)
        return -EPROTO
    madvise(base, bytes, MADV_DONTFORK)      # a forked child must not find the world's words (protocol, rule 14)
    segment.pages = <rank_page**>calloc(size, sizeof(rank_page*))
    if segment.pages == NULL:
        munmap(base, bytes)
        return -ENOMEM
    segment.rank, segment.size, segment.header = rank, size, header
    segment.coordinator = segment_coordinator(header)
    segment.ring = segment_ring(header)
    for r in range(size):
        segment.pages[r] = segment_page(header, r)
    segment.mine = segment.pages[rank]
    store32_release(&segment.mine.joined, 1)
    return 0


cdef void segment_unmap(Segment* segment) noexcept nogil:
    if segment.header != NULL:
        munmap(segment.header, segment_bytes(<uint32_t>segment.size))
        free(segment.pages)
        memset(segment, 0, sizeof(Segment))


cdef void ring_everybody(Segment* segment) noexcept nogil:
    """Wake every thread that sleeps on any door, whatever `asleep` says: after an abort."""
    cdef int r, door
    for r in range(segment.size):
        for door in range(1, 3):
            add32(&segment.pages[r].door[door], 1)
            futex_wake(&segment.pages[r].door[door], 1 << 30)


cdef bint abort_world(Segment* segment, int culprit, int cause, const char* text) noexcept nogil:
    """The first failure of a world is one compare-and-swap; returns whether this was it.

    The text is in place before the word that makes it readable, and one process writes its reason once: a loser's text is
    never read.
    """
    cdef uint64_t word = <uint64_t>(culprit + 1) | <uint64_t>cause << 16 | <uint64_t>segment.rank << 32
    cdef bint first = False
    if cas32(&segment.reason_claimed, 0, 1):
        strncpy(segment.mine.reason, text, REASON_BYTES - 1)
        segment.mine.reason[REASON_BYTES - 1] = 0
        first = cas(&segment.header.abort, 0, word)      # release: pairs with the acquire of whoever reads the reason
    ring_everybody(segment)
    return first
