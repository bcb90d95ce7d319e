from libc.stdint cimport uint64_t

from engine_ext.operations.op cimport Op

cdef class Memory:
    cdef char* data
    cdef uint64_t nbytes

cdef class Part:
    cdef char* base
    cdef uint64_t nbytes
    cdef bint detached          # the arena is gone: the mapping is this object's

cdef Memory take_memory(Op* op)
