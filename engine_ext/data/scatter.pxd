"""Reduce-scatter and all-to-all: what goes to one rank alone."""
from libc.stdint cimport uint64_t

from engine_ext.data.executor cimport Executor

cdef uint64_t scatter_chunks(const Executor* x) noexcept nogil
cdef void pack_scatter(Executor* x, uint64_t n) noexcept nogil
cdef void reduce_scatter(Executor* x, uint64_t n) noexcept nogil
cdef void pack_exchange(Executor* x, uint64_t n) noexcept nogil
cdef void copy_exchange(Executor* x, uint64_t n) noexcept nogil
