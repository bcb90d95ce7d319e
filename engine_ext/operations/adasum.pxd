"""Adasum: the ranks' vectors, combined in pairs by how far they agree."""
from engine_ext.operations.operation cimport Operation

cdef Operation adasum_row() noexcept
