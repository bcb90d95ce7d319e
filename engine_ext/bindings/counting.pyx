"""Whether a process counts, and into which page (shared/counters.h)."""
from libc.errno cimport EPROTO
from libc.stdint cimport uint64_t

from engine_ext.shared.counters cimport counters_map, counters_put

from engine_ext.errors import IncompatibleRanksError


cdef counters_page* map_page(int fd) except NULL:
    """The page in the memory of a descriptor, which stays the caller's."""
    cdef counters_page* page = NULL
    cdef int status = counters_map(fd, &page)
    if status == -EPROTO:
        raise IncompatibleRanksError("the page of counters is of another layout than this build's")
    if status < 0:
        raise OSError(-status, "cannot map the page of counters")
    return page


cdef int tell(counters_page* page, dict fields) except -1:
    """Set fields of one word by their names. Without a page nothing happens."""
    cdef bytes name
    if page == NULL:
        return 0
    for word, value in fields.items():
        name = word.encode()
        if counters_put(page, name, <uint64_t>value) < 0:
            raise ValueError(f"{word} is no field of one word on the page of counters")
    return 0
