"""Sizes of tensors, bounded: a tensor without elements may have dimensions whose product is larger than any memory."""
from libc.stdint cimport int64_t, uint64_t

cdef enum:
    MOST_BITS = 62              # results are at most 2 to the power of this


cdef inline uint64_t bounded_sum(uint64_t a, uint64_t b) noexcept nogil:
    """Return the sum of two bounded sizes, bounded."""
    return min(a + b, <uint64_t>1 << MOST_BITS)


cdef inline uint64_t bounded_product(uint64_t a, uint64_t b) noexcept nogil:
    """Return the product of two sizes, bounded."""
    cdef uint64_t most = <uint64_t>1 << MOST_BITS
    return most if a and b > most // a else a * b


cdef inline uint64_t largest_part(int64_t rows, int size) noexcept nogil:
    """Return the most rows that a rank gets where `rows` are divided among `size` ranks."""
    return (<uint64_t>rows + <uint64_t>size - 1) // <uint64_t>size
