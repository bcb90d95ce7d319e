"""Build the operation that each collective submits from the arguments of its call."""
from libc.stdint cimport int64_t, uint32_t, uint64_t

from engine_ext.bindings.view cimport View
from engine_ext.control.state cimport State
from engine_ext.operations.op cimport Op
from engine_ext.shared.layout cimport WIRE_FP8, WIRE_TUNED, WIRE_TUNED8, engine_meta

cdef void fill_reduction(Op* brought, int op, double prescale, double postscale) noexcept nogil
cdef uint64_t row_bytes(const View* view) noexcept nogil
cdef int64_t own_rows(const State* e, int64_t rows) noexcept nogil
cdef Op* allreduce_op(State* e, object tensor, object output, int op, double prescale, double postscale, object wire) except NULL
cdef Op* direct_allreduce_op(State* e, object tensor, int op, double prescale, double postscale) except? NULL
cdef Op* reducescatter_op(State* e, object tensor, object output, int op, double prescale, double postscale,
                          object wire) except NULL
cdef Op* reduce_group_op(State* e, int kind, list tensors, list outputs, int op, double prescale, double postscale,
                         object wire) except NULL
cdef Op* broadcast_op(State* e, object tensor, object output, Py_ssize_t root) except NULL
cdef Op* allgather_op(State* e, object tensor, object room, object output) except NULL
cdef Op* allgather_group_op(State* e, list tensors, object sparse, object room) except NULL
cdef Op* alltoall_op(State* e, object tensor, object splits, object room, object output) except NULL
cdef Op* send_op(object tensor, bint copy) except NULL
cdef Op* receive_op(object output) except NULL
cdef Op* barrier_op(State* e, object name, bint blocking) except NULL
cdef Op* size_barrier_op(uint64_t nbytes) except NULL

cdef enum:
    FAULT_BYTES = 512           # most bytes of the text of a refused call, terminator included

cdef const char* expect_name(object name, uint32_t* length) except NULL
cdef void fill_meta(engine_meta* meta, int kind, const View* view) noexcept nogil
cdef int wire_number(object wire, int op) except -1
cdef unsigned char wire_of(int chosen, int dtype) noexcept nogil
cdef unsigned char wire_of_group(int chosen, const engine_meta* meta) noexcept nogil
cdef bint wire_fault(int wire, bint parts, int op, int device, char* text) noexcept nogil
cdef int expect_rows(object tensor, const View* view, str verb) except -1
cdef bint reduction_fault(bint parts, const View* view, int op, int wire, double prescale, double postscale, int size,
                          char* text) noexcept nogil
cdef int expect_reduction(bint parts, const View* view, int op, int wire, double prescale, double postscale,
                          int size) except -1
cdef int raise_text(const char* text) except -1
cdef object same_shape(object tensor, const View* source, object output, View* target, int64_t rows)

cdef inline bint may_share(const engine_meta* meta) noexcept:
    """Return whether a tensor may be reduced in memory that the ranks of one host share. Shared tensors are not sent, so a tensor
    whose compression has to take effect on one host may not be shared."""
    return meta.wire in (0, WIRE_FP8, WIRE_TUNED, WIRE_TUNED8)
