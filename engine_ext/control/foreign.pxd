"""Whether what another host has sent is such that ranks of this one may read it."""
from libc.stdint cimport uint64_t

from engine_ext.shared.layout cimport rank_page
from engine_ext.shared.segment cimport Segment

cdef bint foreign_entries(const Segment* segment, const uint64_t* words, uint64_t count) noexcept nogil
cdef bint foreign_requests(const rank_page* page, uint64_t begin, uint64_t end) noexcept nogil
cdef bint foreign_rows(uint64_t rows) noexcept nogil
