"""Metadata in words, without the GIL."""
from engine_ext.control.layout cimport engine_meta

cdef int describe_meta(const engine_meta* meta, char* text, int room) noexcept nogil
cdef int describe_ranks(const bint* chosen, const int* numbers, int size, char* text, int room) noexcept nogil
cdef const char* kind_name(int kind) noexcept nogil
cdef const char* dtype_name(int dtype) noexcept nogil
