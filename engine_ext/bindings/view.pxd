"""A borrowed description of a tensor's memory: pointer, dtype, shape and layout."""
from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t

from engine_ext.operations.op cimport CurrentStream

cdef enum:
    SCATTERED = -1          # elements with gaps between them, or in an unsupported order
    MISALIGNED = -2         # memory that does not begin at a multiple of an element
    HOST = 0                # value of `device`: host memory

cdef struct View:
    char* data              # address of the first element; NULL only without elements
    uint64_t nbytes         # bytes of all elements
    uint64_t count          # number of elements
    int32_t ndim
    int32_t itemsize        # bytes of an element
    int64_t[13] dims        # MAX_DIMS entries; any dimensions beyond are merged into the last
    uint8_t dtype           # ENGINE_FLOAT16 ..
    signed char layout      # LAYOUT_*, or what no rank takes: SCATTERED, MISALIGNED
    bint readonly
    int32_t device          # HOST, or 1 + the number of the GPU
    CurrentStream stream_of  # on a GPU: returns the stream on which its framework works


cdef object view_of(object tensor, View* view)
cdef object view_anywhere(object tensor, View* view)
cdef int add_direct_type(object kind, object is_negated) except -1
cdef bint view_directly(object tensor, View* view) except -1
cdef int expect_dense(object tensor, const View* view, str role) except -1
cdef int expect_reducible(const View* view, str what) except -1
