"""Memory that the engine gives to Python, and objects that an operation keeps alive."""
from libc.stdint cimport uint64_t

from engine_ext.control.state cimport State
from engine_ext.operations.op cimport Op
from engine_ext.transport.arena cimport Arena

cdef class Memory:
    cdef char* data
    cdef uint64_t nbytes

cdef class Part:
    cdef char* base
    cdef uint64_t nbytes
    cdef bint detached          # the arena is closed: this object owns the mapping

cdef Memory take_memory(Op* op)
cdef Memory copy_memory(const char* data, uint64_t nbytes)
cdef int grow_arena(Arena* arena, uint64_t nbytes) except -1
cdef int map_region(Arena* arena, uint64_t nbytes) except -1
cdef Part part_of(const Arena* arena, int region, uint64_t nbytes)

cdef void keep_alive(Op* op, object owner) noexcept
cdef void abandon_op(State* e, Op* op) noexcept
cdef void free_when_passed(State* e, Op* op) noexcept
cdef void free_deferred(State* e) noexcept
