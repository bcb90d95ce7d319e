"""Metadata in words, without the GIL."""
from engine_ext.shared.layout cimport engine_meta

cdef int describe_dtypes(int first, int end, char* text, int room) noexcept nogil
cdef int describe_meta(const engine_meta* meta, char* text, int room) noexcept nogil
cdef int describe_ranks(const bint* chosen, const int* numbers, int size, char* text, int room) noexcept nogil
cdef const char* op_name(int op) noexcept nogil
cdef const char* dtype_name(int dtype) noexcept nogil

cdef inline int fit(int at, int written, int room) noexcept nogil:
    """Where a text ends to which snprintf has added `written` bytes, as far as there was room."""
    return at + written if at + written < room else room - 1
