"""Whether a process counts, and into which page (shared/counters.h)."""
from libc.errno cimport EPROTO
from libc.stdint cimport uint64_t

from engine_ext.shared.counters cimport counters_map, counters_put, counters_write

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
    """Set fields by their names: of one word to a number, of several to a text. Without a page nothing happens."""
    cdef bytes name, text
    cdef int status
    if page == NULL:
        return 0
    for word, value in fields.items():
        name = word.encode()
        if isinstance(value, str):
            text = value.encode(errors="replace")
            status = counters_write(page, name, text, <uint64_t>len(text))
        else:
            status = counters_put(page, name, <uint64_t>value)
        if status < 0:
            raise ValueError(f"{word} is no field of {'several words' if isinstance(value, str) else 'one word'} on the page "
                             "of counters")
    return 0
