"""All-to-all: every rank sends rows to each, and gets rows from each."""
from engine_ext.operations.operation cimport Operation

cdef Operation alltoall_row() noexcept
