"""Rotate: every rank gets the tensor of the rank before it."""
from engine_ext.operations.operation cimport Operation

cdef Operation rotate_row() noexcept
