"""What pack, reduce and copy do to one chunk, for each kind of entry."""
from libc.stdint cimport uint64_t

from engine_ext.data.executor cimport Executor

cdef void pack_chunk(Executor* x, uint64_t n) noexcept nogil
cdef void reduce_chunk(Executor* x, uint64_t n) noexcept nogil
cdef void copy_chunk(Executor* x, uint64_t n) noexcept nogil
