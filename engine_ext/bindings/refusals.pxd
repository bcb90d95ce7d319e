"""Exceptions that a call of the engine raises, and statuses and texts of native calls: who, what, and how to mend it."""
from libc.stdint cimport uint32_t

from engine_ext.bindings.memory cimport free_deferred
from engine_ext.control.driver cimport Target
from engine_ext.control.failure cimport FAILURE_TEXT_BYTES
from engine_ext.control.state cimport State
from engine_ext.operations.op cimport Op
from engine_ext.platform.atomics cimport load_pointer
from engine_ext.shared.layout cimport NAME_BYTES

cdef int refuse_closed(State* e) except -1
cdef int raise_refusal(State* e, int status, str name) except -1
cdef object world_error(State* e)
cdef object make_mismatch_error(State* e, const Op* op, str what)
cdef str set_text(State* e)

cdef inline int expect_open(State* e) except -1:
    """Raise in a forked child or after close; every native entry begins with this. Also frees deferred operations."""
    if e.alive == NULL or e.segment.header == NULL or e.alive[0] != 1 or e.closed:
        return refuse_closed(e)
    if load_pointer(&e.deferred_free) != NULL or e.deferred_on_device != NULL:
        free_deferred(e)
    return 0

cdef enum:
    TEXT_BYTES = FAILURE_TEXT_BYTES + NAME_BYTES     # size of a result's text, terminator included

cdef int text_of_end(const Op* op, const char* name, uint32_t name_bytes, char* text) noexcept nogil
cdef int text_of_refusal(State* e, const Target* target, int status, char* text) noexcept nogil
cdef void text_as_utf8(char* text) noexcept nogil
