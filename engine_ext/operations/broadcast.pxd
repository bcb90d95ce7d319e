"""Broadcast: every rank gets the tensors of one."""
from libc.stdint cimport uint64_t

from engine_ext.data.executor cimport Executor
from engine_ext.operations.operation cimport Operation

cdef Operation broadcast_row() noexcept
cdef bint broadcast_memory(Executor* x, int root, uint64_t chunk, char* memory, uint64_t nbytes) noexcept nogil
