"""Do pieces of memory overlap?"""

cdef struct Extent:
    const char* begin
    const char* end
    int index           # whose

cdef Py_ssize_t first_overlap(Extent* extents, Py_ssize_t count) noexcept nogil
