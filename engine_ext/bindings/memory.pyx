"""Memory that the engine gives to Python, as objects that own it; checksums of memory; and what an operation keeps alive."""
from cpython.buffer cimport PyBuffer_FillInfo
from cpython.object cimport PyObject
from cpython.ref cimport Py_INCREF, Py_XDECREF
from libc.stdlib cimport free
from libc.string cimport memcpy

from engine_ext.bindings.devices cimport is_known_passed, release_mark
from engine_ext.bindings.view cimport View, add_direct_type, expect_dense, view_anywhere, view_of
from engine_ext.operations.op cimport OP_ABANDONED, OP_DONE
from engine_ext.operations.operation cimport free_op
from engine_ext.platform.atomics cimport load_pointer, or32, swap_pointer
from engine_ext.platform.hash cimport fnv, fnv_begin
from engine_ext.transport.arena cimport arena_grow, arena_map, arena_populate_own, arena_unmap

cdef extern from "platform/memory.h" nogil:
    char* engine_memory_take(uint64_t bytes)

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


cdef Memory copy_memory(const char* data, uint64_t nbytes):
    """Bytes of this object's own, equal to those at `data`."""
    cdef Memory memory = Memory.__new__(Memory)
    memory.data, memory.nbytes = engine_memory_take(nbytes), nbytes
    if memory.data == NULL:
        raise MemoryError(f"no memory for a message of {nbytes} bytes")
    if nbytes:
        memcpy(memory.data, data, nbytes)
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


def lend_directly(kind, is_negated):
    """Have tensors of a type, but not of its subclasses, reduced where they lie without a look at anything but their memory,
    unless `is_negated` says of one that its elements are the negatives of what lies there."""
    add_direct_type(kind, is_negated)


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


# ---- who owns an operation --------------------------------------------------------------------------------------------------

# Who owns an operation of this rank, and what it keeps alive.
#
# Reference counts are touched under the GIL only. An operation holds one reference to what keeps its tensors alive. Whoever made
# it frees it; or, when its maker went before the engine had let go of it, the next call does, from the deferred free list
# (docs/architecture/protocol.md, I9). Tensors on a GPU may be in use when the engine has let go of the operation: unless the
# stream that they were submitted on waits for it, they are kept until the device has passed it, in `deferred_on_device`.

cdef void keep_alive(Op* op, object owner) noexcept:
    """Keep `owner`, whose memory the operation uses, until the operation is freed; not what it has kept before."""
    cdef PyObject* before = <PyObject*>op.owner
    Py_INCREF(owner)
    op.owner = <void*>owner
    Py_XDECREF(before)


cdef void let_go(State* e, Op* op) noexcept:
    """Free an operation that is done and that nobody holds, now or when the device has passed it. In a forked child, where CUDA
    does not work, it stays."""
    if e.world.device != NULL and e.alive[0] != 1:
        return
    release_mark(e, op)
    if op.released or is_known_passed(e, op.ticket):
        free_op(op)
    else:
        op.next, e.deferred_on_device = e.deferred_on_device, op


cdef void abandon_op(State* e, Op* op) noexcept:
    """Nobody waits for `op` any more: it is freed now, or with the deferred ones when it is done."""
    if or32(&op.flags, OP_ABANDONED) & OP_DONE:
        let_go(e, op)       # else complete_op() defers the free


cdef void free_deferred(State* e) noexcept:
    """Free operations that are done and that nobody holds."""
    cdef Op* op
    cdef Op* after
    if e.deferred_on_device != NULL:
        op, e.deferred_on_device = e.deferred_on_device, NULL
        while op != NULL:
            after = op.next
            let_go(e, op)
            op = after
    if load_pointer(&e.deferred_free) == NULL:
        return
    op = <Op*>swap_pointer(&e.deferred_free, NULL)
    while op != NULL:
        after = op.next
        let_go(e, op)
        op = after
