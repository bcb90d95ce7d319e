"""Adasum: the ranks' vectors, combined in pairs by how far they agree."""
from libc.stdint cimport uint64_t

from engine_ext.data.executor cimport Executor

cdef bint adasum_start(Executor* x) noexcept nogil
cdef void pack_products(Executor* x, uint64_t n) noexcept nogil
cdef void reduce_products(Executor* x, uint64_t n) noexcept nogil
cdef void copy_products(Executor* x, uint64_t n) noexcept nogil
