"""What a rank without a tensor contributes."""
from libc.stdint cimport uint64_t

cdef void fill_identity(char* into, int dtype, int op, uint64_t count) noexcept nogil
