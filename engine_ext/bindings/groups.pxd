"""Operations on several tensors."""
from libc.stdint cimport int64_t, uint32_t, uint64_t

from engine_ext.bindings.view cimport View
from engine_ext.operations.op cimport Op

cdef int group_open(Op* op, int kind, Py_ssize_t count) except -1
cdef object group_add(Op* op, Py_ssize_t k, object tensor, View* view)
cdef bint group_begin(Op* op, int kind, Py_ssize_t count) noexcept nogil
cdef void group_count(Op* op, Py_ssize_t k, const View* view) noexcept nogil
cdef bint group_payload(Op* op) noexcept nogil
cdef uint64_t group_rows(const char* memory, const int64_t* nbytes, int size, uint32_t k, int64_t* rows,
                         uint64_t* row_bytes) noexcept nogil
cdef void group_skip(const char* memory, const int64_t* nbytes, int size, uint32_t count, uint32_t first, uint32_t k,
                     uint64_t* offsets) noexcept nogil
cdef void group_copy(const char* memory, const int64_t* nbytes, int size, uint32_t k, uint64_t* offsets, char* to) noexcept nogil
cdef int group_expect_apart(const Op* op) except -1
cdef int group_gather(Op* op) except -1
cdef int group_sparse(Op* op, object shape, object fault) except -1
cdef list group_parts(const char* memory, const int64_t* nbytes, int size, uint32_t count)

cdef struct Extent:
    const char* begin
    const char* end
    int index           # of the tensor that it belongs to
    bint reads          # it is only read; two such extents may overlap

cdef Py_ssize_t first_overlap(Extent* extents, Py_ssize_t count) noexcept nogil
cdef bint find_overlap(Extent* extents, Py_ssize_t count, int* one, int* other) noexcept nogil
