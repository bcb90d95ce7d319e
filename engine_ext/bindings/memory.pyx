"""Memory that the engine gives to Python, as objects that own it; checksums; and objects that an operation keeps alive."""
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
    """Bytes that an operation allocated, owned by this object."""

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
    """Move the result that an operation has allocated into a Python object."""
    cdef Memory memory = Memory.__new__(Memory)
    memory.data, memory.nbytes = op.memory, op.memory_bytes
    op.memory = NULL
    return memory


cdef Memory copy_memory(const char* data, uint64_t nbytes):
    """Return a copy of `nbytes` bytes at `data`, in memory of its own."""
    cdef Memory memory = Memory.__new__(Memory)
    memory.data, memory.nbytes = engine_memory_take(nbytes), nbytes
    if memory.data == NULL:
        raise MemoryError(f"no memory for a message of {nbytes} bytes")
    if nbytes:
        memcpy(memory.data, data, nbytes)
    return memory


cdef int grow_arena(Arena* arena, uint64_t nbytes) except -1:
    """Extend the arena's file by a region with `nbytes` for each rank. One rank of a host does so before the others map it."""
    cdef int status = arena_grow(arena, nbytes)
    if status < 0:
        raise OSError(-status, f"cannot allocate {nbytes} shared bytes for each of {arena.size} ranks")
    return 0


cdef int map_region(Arena* arena, uint64_t nbytes) except -1:
    """Map the next region and populate the pages of this rank's part; return the region's number."""
    cdef int region = arena_map(arena, nbytes)
    if region < 0:
        raise OSError(-region, f"cannot map {nbytes} shared bytes of each of {arena.size} ranks")
    with nogil:
        arena_populate_own(arena, region)
    return region


cdef Part part_of(const Arena* arena, int region, uint64_t nbytes):
    """Return this rank's part of a region."""
    cdef Part part = Part.__new__(Part)
    part.base, part.nbytes = arena.regions[region].bases[arena.rank], nbytes
    return part


def expect_memory(tensor):
    """Raise UnsupportedTensorError unless a tensor lends memory, contiguous or not."""
    cdef View view
    view_anywhere(tensor, &view)


def lend_directly(kind, is_negated):
    """Allow tensors of exactly type `kind` to be reduced in place after a look at nothing but their memory.

    `is_negated` says whether the elements of a tensor are the negatives of what lies in memory; such a tensor is excluded.
    """
    add_direct_type(kind, is_negated)


def checksum(tensor):
    """Return a 64-bit checksum of a tensor's bytes: FNV-1a over words, then over the remaining bytes."""
    cdef View view
    _keeper = view_of(tensor, &view)        # keeps the tensor's memory in place
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


# ---- ownership of operations ------------------------------------------------------------------------------------------------

# Ownership of this rank's operations, and the objects that they keep alive.
#
# Reference counts change under the GIL only. An operation holds one reference to the owner of its tensors' memory. Its maker
# frees it. If the maker goes before the engine has finished it, the next call frees it from the deferred free list
# (docs/architecture/protocol.md, I9). Tensors on a GPU may be in use after the engine has finished the operation. Unless the
# stream on which they were submitted waits for it, they are kept in `deferred_on_device` until the device has passed it.

cdef void keep_alive(Op* op, object owner) noexcept:
    """Keep `owner`, whose memory the operation uses, alive until the operation is freed; release what it kept before."""
    cdef PyObject* before = <PyObject*>op.owner
    Py_INCREF(owner)
    op.owner = <void*>owner
    Py_XDECREF(before)


cdef void free_when_passed(State* e, Op* op) noexcept:
    """Free a finished operation that nobody holds, now or once the device has passed it. In a forked child, where CUDA does not
    work, a process with a GPU leaks it."""
    if e.world.device != NULL and e.alive[0] != 1:
        return
    release_mark(e, op)
    if op.released or is_known_passed(e, op.ticket):
        free_op(op)
    else:
        op.next, e.deferred_on_device = e.deferred_on_device, op


cdef void abandon_op(State* e, Op* op) noexcept:
    """Give up the caller's hold on `op`: free it now if it is done, else when it is done, with the deferred ones."""
    if or32(&op.flags, OP_ABANDONED) & OP_DONE:
        free_when_passed(e, op)       # else complete_op() defers the free


cdef void free_deferred(State* e) noexcept:
    """Free finished operations that nobody holds, except those that the device still uses."""
    cdef Op* op
    cdef Op* after
    if e.deferred_on_device != NULL:
        op, e.deferred_on_device = e.deferred_on_device, NULL
        while op != NULL:
            after = op.next
            free_when_passed(e, op)
            op = after
    if load_pointer(&e.deferred_free) == NULL:
        return
    op = <Op*>swap_pointer(&e.deferred_free, NULL)
    while op != NULL:
        after = op.next
        free_when_passed(e, op)
        op = after
