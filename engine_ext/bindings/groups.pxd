"""Operations on several tensors."""
from libc.stdint cimport int64_t, uint32_t

from engine_ext.bindings.view cimport View
from engine_ext.operations.op cimport Op

cdef int group_open(Op* op, int kind, Py_ssize_t count) except -1
cdef object group_add(Op* op, Py_ssize_t k, object tensor, View* view)
cdef int group_expect_apart(const Op* op) except -1
cdef int group_gather(Op* op) except -1
cdef int group_sparse(Op* op, object shape, object fault) except -1
cdef list group_parts(const char* memory, const int64_t* nbytes, int size, uint32_t count)
