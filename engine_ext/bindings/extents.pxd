"""Do pieces of memory overlap?"""

cdef struct Extent:
    const char* begin
    const char* end
    int index           # whose
    bint reads          # it is only read: two of these may overlap

cdef Py_ssize_t first_overlap(Extent* extents, Py_ssize_t count) noexcept nogil
cdef bint find_overlap(Extent* extents, Py_ssize_t count, int* one, int* other) noexcept nogil
