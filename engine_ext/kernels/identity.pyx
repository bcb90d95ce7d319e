"""The identity of each operation for each dtype: what leaves the other ranks' values as they are."""
from libc.stdint cimport uint64_t
from libc.string cimport memcpy, memset

from engine_ext.kernels.kernels cimport ENGINE_ADASUM, ENGINE_AVERAGE, ENGINE_MIN, ENGINE_PRODUCT, ENGINE_SUM, dtype_bytes

# One element each, as bits, by dtype: 1, the least value and the greatest.
cdef uint64_t* ONE = [0x3C00, 0x3F80, 0x3F800000, 0x3FF0000000000000, 1, 1, 1, 1, 1, 1, 1]
cdef uint64_t* LEAST = [
    0xFC00, 0xFF80, 0xFF800000, 0xFFF0000000000000, 0x80, 0, 0x8000, 0, 0x80000000, 0x8000000000000000, 0,
]
cdef uint64_t* GREATEST = [
    0x7C00, 0x7F80, 0x7F800000, 0x7FF0000000000000, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x7FFFFFFFFFFFFFFF, 1,
]


cdef void fill_identity(char* into, int dtype, int op, uint64_t count) noexcept nogil:
    cdef uint64_t bits, i
    cdef int item = <int>dtype_bytes(dtype)
    if op == ENGINE_SUM or op == ENGINE_AVERAGE or op == ENGINE_ADASUM:
        memset(into, 0, count * item)
        return
    bits = ONE[dtype] if op == ENGINE_PRODUCT else GREATEST[dtype] if op == ENGINE_MIN else LEAST[dtype]
    for i in range(count):          # little-endian: the low bytes of `bits` are the element
        memcpy(into + i * item, &bits, item)
