"""Names in a hash table: those of a rank (table.pyx), and those of the coordinator."""
from libc.stdint cimport int32_t, uint32_t, uint64_t

cdef struct Named:          # what a Record and a coordinator's NameState begin with
    Named* chain            # of its hash bucket
    char* name              # ends with a zero that does not count
    uint32_t name_bytes
    int32_t id              # under which the name travels as a bit; -1: the coordinator has not given one
    uint64_t hash

cdef struct Names:
    Named** buckets
    uint64_t count

cdef bint names_open(Names* names) noexcept nogil
cdef void names_close(Names* names, void (*release)(void* owner, Named* named) noexcept nogil, void* owner) noexcept nogil
cdef Named* names_find(Names* names, const char* text, uint32_t text_bytes) noexcept nogil
cdef Named* names_add(Names* names, const char* text, uint32_t text_bytes, size_t size) noexcept nogil
cdef void names_remove(Names* names, Named* named) noexcept nogil
