"""The table of operations: a row by kind and reduction."""
from libc.stdint cimport int64_t

from engine_ext.kernels.kernels cimport ENGINE_ADASUM, ENGINE_AVERAGE, ENGINE_SUM
from engine_ext.operations.operation cimport Operation
from engine_ext.shared.layout cimport engine_meta

cdef enum:
    REDUCTIONS = ENGINE_ADASUM + 1

cdef const Operation** OPERATIONS       # by kind and reduction

cdef const char* kind_name(int kind) noexcept nogil
cdef int64_t wire_bytes(const engine_meta* meta, int wire) noexcept nogil

cdef inline const Operation* operation_of(const engine_meta* meta) noexcept nogil:
    """Return the row of an operation. Kinds that reduce nothing have the same row for every reduction."""
    return OPERATIONS[meta.kind * REDUCTIONS + meta.op]

cdef inline bint can_be_coded(const engine_meta* meta) noexcept nogil:
    """Return whether an operation can travel block-scaled: a sum or an average of tensors in host memory."""
    return operation_of(meta).codes and (meta.op == ENGINE_SUM or meta.op == ENGINE_AVERAGE) and not meta.device

cdef Operation barrier_row() noexcept

cdef int describe_dtypes(int first, int end, char* text, int room) noexcept nogil
cdef int describe_meta(const engine_meta* meta, char* text, int room) noexcept nogil
cdef int describe_ranks(const bint* chosen, const int* numbers, int size, char* text, int room) noexcept nogil
cdef const char* op_name(int op) noexcept nogil
cdef const char* dtype_name(int dtype) noexcept nogil

cdef inline int fit(int at, int written, int room) noexcept nogil:
    """Return the end of a text to which snprintf has added `written` bytes, or as many of them as there was room for."""
    return at + written if at + written < room else room - 1
