"""Whether a process counts, and into which page (shared/counters.h)."""
from engine_ext.shared.counters cimport counters_page

cdef counters_page* map_page(int fd) except NULL
cdef int tell(counters_page* page, dict fields) except -1
