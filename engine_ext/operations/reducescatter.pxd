"""Reduce-scatter: rank r gets its part of the rows of the ranks' tensors, reduced."""
from engine_ext.operations.operation cimport Operation

cdef Operation reducescatter_row() noexcept
