"""Barrier: no rank goes on before all have come."""
from engine_ext.operations.operation cimport Operation

cdef Operation barrier_row() noexcept
