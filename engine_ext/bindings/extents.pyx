"""Do pieces of memory overlap? They are sorted by their beginnings: then each has to be held against those before it that reach
furthest, and where all are written against its neighbour alone, if none has overlapped before."""
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


cdef bint find_overlap(Extent* extents, Py_ssize_t count, int* one, int* other) noexcept nogil:
    """Whether an extent overlaps another that is written, or is written itself; and then whose the two are, the lower first."""
    cdef const Extent* x
    cdef const Extent* reaching
    cdef Extent written, read
    cdef Py_ssize_t k
    written.end = read.end = NULL
    for k in range(1, count):
        if extents[k].begin < extents[k - 1].begin:
            qsort(extents, <size_t>count, sizeof(Extent), by_begin)
            break
    for k in range(count):
        x = &extents[k]
        reaching = &written if x.begin < written.end else &read
        if x.begin < reaching.end and not (x.reads and reaching.reads):
            one[0], other[0] = min(x.index, reaching.index), max(x.index, reaching.index)
            return True
        if x.reads and x.end > read.end:
            read = x[0]
        elif not x.reads and x.end > written.end:
            written = x[0]
    return False
