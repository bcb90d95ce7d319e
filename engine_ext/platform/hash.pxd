"""The only hash of the engine (hash.h)."""
from libc.stdint cimport uint64_t

cdef extern from "engine_ext/platform/hash.h" nogil:
    uint64_t fnv_begin()
    uint64_t fnv(uint64_t h, uint64_t item)
    uint64_t fnv_text(uint64_t h, const char* text, size_t bytes)
