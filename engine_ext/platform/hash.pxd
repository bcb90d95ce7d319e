"""FNV-1a, the one hash of the engine: of names, of shapes, of memory."""
from libc.stdint cimport uint64_t

cdef inline uint64_t fnv_begin() noexcept nogil:
    return 14695981039346656037u

cdef inline uint64_t fnv(uint64_t h, uint64_t item) noexcept nogil:
    """The hash of what `h` stands for, followed by `item`: a byte, or a word."""
    return (h ^ item) * 1099511628211u
