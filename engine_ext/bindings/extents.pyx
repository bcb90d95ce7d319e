"""Do pieces of memory overlap? They are sorted by their beginnings: then only neighbours can, if none has before."""
from libc.stdlib cimport qsort


cdef int by_begin(const void* a, const void* b) noexcept nogil:
    cdef const char* x = (<const Extent*>a).begin
    cdef const char* y = (<const Extent*>b).begin
    return (x > y) - (x < y)


cdef Py_ssize_t first_overlap(Extent* extents, Py_ssize_t count) noexcept nogil:
    """Sort; where the first extent lies that begins inside its predecessor, or -1."""
    cdef Py_ssize_t k
    qsort(extents, <size_t>count, sizeof(Extent), by_begin)
    for k in range(1, count):
        if extents[k].begin < extents[k - 1].end:
            return k
    return -1
