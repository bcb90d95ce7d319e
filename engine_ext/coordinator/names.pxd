"""Names in a hash table with chained buckets: those of a rank (table.pyx), and those of the coordinator (requests.pyx).

The table's owner gives a name its meaning, in a struct that begins with Named.
"""
from libc.stdint cimport int32_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcmp, memcpy

from engine_ext.platform.hash cimport fnv_begin, fnv_text

cdef enum:
    NAME_BUCKETS = 16384

cdef struct Named:          # the first fields of a Record and of a coordinator's NameState
    Named* chain            # the next name of its hash bucket
    char* name              # malloc'ed; a zero follows that `name_bytes` does not count
    uint32_t name_bytes
    int32_t id              # the id under which the name travels as a bit; -1: the coordinator has not given one
    uint64_t hash

cdef struct Names:
    Named** buckets
    uint64_t count

cdef inline bint names_open(Names* names) noexcept nogil:
    """Initialize a table. False without memory."""
    names.count = 0
    names.buckets = <Named**>calloc(NAME_BUCKETS, sizeof(Named*))
    return names.buckets != NULL

cdef inline Named* names_find(Names* names, const char* text, uint32_t text_bytes) noexcept nogil:
    """Return the name with this text; NULL: there is none."""
    cdef uint64_t h = fnv_text(fnv_begin(), text, text_bytes)
    cdef Named* named = names.buckets[h % NAME_BUCKETS]
    while named != NULL:
        if named.hash == h and named.name_bytes == text_bytes and memcmp(named.name, text, text_bytes) == 0:
            return named
        named = named.chain
    return NULL

cdef inline Named* names_add(Names* names, const char* text, uint32_t text_bytes, size_t size) noexcept nogil:
    """Add a new name, of `size` bytes that are zero behind Named. NULL without memory."""
    cdef Named* named = <Named*>calloc(1, size)
    cdef Named** bucket
    if named == NULL:
        return NULL
    named.name = <char*>malloc(text_bytes + 1)
    if named.name == NULL:
        free(named)
        return NULL
    memcpy(named.name, text, text_bytes)
    named.name[text_bytes] = 0
    named.name_bytes, named.hash, named.id = text_bytes, fnv_text(fnv_begin(), text, text_bytes), -1
    bucket = &names.buckets[named.hash % NAME_BUCKETS]
    named.chain, bucket[0] = bucket[0], named
    names.count += 1
    return named

cdef inline void names_remove(Names* names, Named* named) noexcept nogil:
    """Remove a name from the table, and free it."""
    cdef Named** link = &names.buckets[named.hash % NAME_BUCKETS]
    while link[0] != named:
        link = &link[0].chain
    link[0] = named.chain
    names.count -= 1
    free(named.name)
    free(named)

cdef inline void names_close(Names* names, void (*release)(void* owner, Named* named) noexcept nogil, void* owner) noexcept nogil:
    """Remove and free every name. `release`, unless it is NULL, first frees the memory that the name's struct owns."""
    cdef Named* named
    cdef int b
    for b in range(NAME_BUCKETS if names.buckets != NULL else 0):
        while names.buckets[b] != NULL:
            named = names.buckets[b]
            if release != NULL:
                release(owner, named)
            names_remove(names, named)
    free(names.buckets)
    names.buckets = NULL
