"""Allgather: every rank gets the rows of all."""
from engine_ext.operations.operation cimport Operation

cdef Operation gather_row() noexcept
