"""Allgather: every rank gets the rows of all."""
from libc.stdint cimport uint64_t

from engine_ext.data.executor cimport Executor
from engine_ext.operations.operation cimport Operation

cdef Operation allgather_row() noexcept
cdef bint allgather_memory(Executor* x, uint64_t chunk, char* own, uint64_t nbytes, char* all) noexcept nogil
