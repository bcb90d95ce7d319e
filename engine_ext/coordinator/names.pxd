"""Names in a hash table: those of a rank (table.pyx), and those of the coordinator."""
from libc.stdint cimport int32_t, uint32_t, uint64_t

cdef struct Named:          # the first fields of a Record and of a coordinator's NameState
    Named* chain            # the next name of its hash bucket
    char* name              # malloc'ed; a zero follows that `name_bytes` does not count
    uint32_t name_bytes
    int32_t id              # the id under which the name travels as a bit; -1: the coordinator has not given one
    uint64_t hash

cdef struct Names:
    Named** buckets
    uint64_t count

cdef bint names_open(Names* names) noexcept nogil
cdef void names_close(Names* names, void (*release)(void* owner, Named* named) noexcept nogil, void* owner) noexcept nogil
cdef Named* names_find(Names* names, const char* text, uint32_t text_bytes) noexcept nogil
cdef Named* names_add(Names* names, const char* text, uint32_t text_bytes, size_t size) noexcept nogil
cdef void names_remove(Names* names, Named* named) noexcept nogil
