"""What a call of the engine raises."""
from libc.stdint cimport uint64_t

from engine_ext.bindings.ownership cimport bury
from engine_ext.control.state cimport State
from engine_ext.operations.op cimport Op
from engine_ext.platform.atomics cimport load_pointer

cdef int refuse_closed(State* e) except -1
cdef int refuse(State* e, int status, str name) except -1
cdef object world_error(State* e)
cdef object disagreement(const Op* op, str what)
cdef str set_text(State* e)

cdef inline int expect_open(State* e) except -1:
    """Every native entry: not in a forked child, not after close. Frees what nobody holds any more."""
    if e.alive == NULL or e.segment.header == NULL or e.alive[0] != 1 or e.closed:
        return refuse_closed(e)
    if load_pointer(&e.deferred_free) != NULL or e.graves != NULL:
        bury(e)
    return 0
