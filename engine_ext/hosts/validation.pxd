"""Validation of what another host has sent, before ranks of this host read it."""
from libc.stdint cimport uint64_t

from engine_ext.shared.segment cimport Segment

cdef bint entries_are_valid(const Segment* segment, const uint64_t* words, uint64_t count) noexcept nogil
cdef bint requests_are_valid(const Segment* segment, int rank, uint64_t begin, uint64_t end) noexcept nogil
cdef bint rows_are_valid(uint64_t rows) noexcept nogil
cdef bint range_is_valid(uint64_t position, uint64_t count, uint64_t first, uint64_t room) noexcept nogil
