"""The operation that each collective submits, made from the arguments of its call."""
from libc.stdint cimport int64_t, uint64_t

from engine_ext.bindings.view cimport View
from engine_ext.control.state cimport State
from engine_ext.operations.op cimport Op

cdef void fill_reduction(Op* brought, int op, double prescale, double postscale) noexcept nogil
cdef uint64_t row_bytes(const View* view) noexcept nogil
cdef int64_t own_rows(const State* e, int64_t rows) noexcept nogil
cdef Op* allreduce_op(State* e, object tensor, object output, int op, double prescale, double postscale, object wire) except NULL
cdef Op* reducescatter_op(State* e, object tensor, object output, int op, double prescale, double postscale,
                          object wire) except NULL
cdef Op* reduce_group_op(State* e, int kind, list tensors, list outputs, int op, double prescale, double postscale,
                         object wire) except NULL
cdef Op* broadcast_op(State* e, object tensor, object output, Py_ssize_t root) except NULL
cdef Op* allgather_op(State* e, object tensor, object room) except NULL
cdef Op* allgather_group_op(State* e, list tensors, object sparse, object room) except NULL
cdef Op* alltoall_op(State* e, object tensor, object splits, object room) except NULL
cdef Op* barrier_op(State* e, object name, bint blocking) except NULL
cdef Op* size_barrier_op(uint64_t nbytes) except NULL
