"""Memory that the engine gives to Python, as objects that own it; and checksums of memory it is shown."""
from cpython.buffer cimport PyBuffer_FillInfo
from libc.stdint cimport uint64_t
from libc.stdlib cimport free

from engine_ext.bindings.view cimport View, expect_dense, view_anywhere, view_of
from engine_ext.platform.hash cimport fnv, fnv_begin
from engine_ext.transport.arena cimport arena_grow, arena_map, arena_populate_own, arena_unmap

cdef extern from *:
    """
    typedef struct __attribute__((packed)) { uint64_t value; } Unaligned;
    """
    ctypedef struct Unaligned:
        uint64_t value


cdef class Memory:
    """Bytes that an operation allocated, now owned by whoever holds this."""

    def __getbuffer__(self, Py_buffer* buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self.data, <Py_ssize_t>self.nbytes, False, flags)

    def __dealloc__(self):
        free(self.data)


cdef class Part:
    """This rank's part of a region of the arena. The engine holds it until it closes."""
    def __getbuffer__(self, Py_buffer* buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self.base, <Py_ssize_t>self.nbytes, False, flags)

    def __dealloc__(self):
        if self.detached:
            arena_unmap(self.base, self.nbytes)


cdef Memory take_memory(Op* op):
    """The result that an operation has allocated."""
    cdef Memory memory = Memory.__new__(Memory)
    memory.data, memory.nbytes = op.memory, op.memory_bytes
    op.memory = NULL
    return memory


cdef int grow_arena(Arena* arena, uint64_t nbytes) except -1:
    """Make room for a region with `nbytes` for each rank: on one rank, before the others map it."""
    cdef int status = arena_grow(arena, nbytes)
    if status < 0:
        raise OSError(-status, f"cannot allocate {nbytes} shared bytes for each of {arena.size} ranks")
    return 0


cdef int map_region(Arena* arena, uint64_t nbytes) except -1:
    """Map the next region and make the pages of this rank's part: the number of the region."""
    cdef int region = arena_map(arena, nbytes)
    if region < 0:
        raise OSError(-region, f"cannot map {nbytes} shared bytes of each of {arena.size} ranks")
    with nogil:
        arena_populate_own(arena, region)
    return region


cdef Part part_of(const Arena* arena, int region, uint64_t nbytes):
    """This rank's part of a region."""
    cdef Part part = Part.__new__(Part)
    part.base, part.nbytes = arena.regions[region].bases[arena.rank], nbytes
    return part


def expect_memory(tensor):
    """Raise UnsupportedTensorError unless a tensor lends memory, contiguous or not."""
    cdef View view
    view_anywhere(tensor, &view)


def checksum(tensor):
    """64-bit checksum of the bytes of a tensor (FNV-1a over words, the rest over bytes)."""
    cdef View view
    _keeper = view_of(tensor, &view)        # the tensor's memory stays while this is held
    expect_dense(tensor, &view, "it")
    cdef uint64_t h = fnv_begin()
    cdef uint64_t words = view.nbytes // 8, i
    cdef const unsigned char* rest
    with nogil:
        for i in range(words):
            h = fnv(h, (<const Unaligned*>(view.data + 8 * i)).value)
            h ^= h >> 32
        rest = <const unsigned char*>view.data + 8 * words
        for i in range(view.nbytes % 8):
            h = fnv(h, rest[i])
    return h
