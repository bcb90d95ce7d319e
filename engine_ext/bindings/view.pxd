"""What memory a tensor is: pointer, dtype, shape and layout, borrowed."""
from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t

from engine_ext.operations.op cimport CurrentStream

cdef enum:
    SCATTERED = -1          # elements with gaps between them, or in an order that has no name
    MISALIGNED = -2         # memory that does not begin at a multiple of an element
    HOST = 0                # of `device`

cdef struct View:
    char* data
    uint64_t nbytes
    uint64_t count          # elements
    int32_t ndim
    int32_t itemsize        # bytes of an element
    int64_t[13] dims        # MAX_DIMS; more dimensions are described as one
    uint8_t dtype
    signed char layout      # LAYOUT_*, or what no rank takes: SCATTERED, MISALIGNED
    bint readonly
    int32_t device          # HOST, or 1 + the number of the GPU
    CurrentStream stream_of  # of a tensor on a GPU: which stream its framework works on


cdef object view_of(object tensor, View* view)
cdef object view_anywhere(object tensor, View* view)
cdef int add_direct_type(object kind, object is_negated) except -1
cdef bint view_directly(object tensor, View* view) except -1
cdef int expect_dense(object tensor, const View* view, str role) except -1
cdef int expect_reducible(const View* view, str what) except -1
