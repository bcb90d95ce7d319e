"""Reduce-scatter and all-to-all: what goes to one rank alone."""
from libc.stdint cimport uint64_t

from engine_ext.data.executor cimport Executor

cdef uint64_t scatter_chunks(const Executor* x) noexcept nogil
cdef uint64_t scatter_compartment(const Executor* x, int rank) noexcept nogil
cdef void scatter_window(const Executor* x, uint64_t n, int rank, uint64_t* low, uint64_t* high) noexcept nogil
cdef void pack_exchange(Executor* x, uint64_t n) noexcept nogil
cdef void copy_exchange(Executor* x, uint64_t n) noexcept nogil
