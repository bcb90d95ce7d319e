"""Who keeps this rank from going on."""
from libc.stdint cimport uint64_t

from engine_ext.control.state cimport State
from engine_ext.control.table cimport Op

cdef void stall_check(State* e) noexcept nogil
cdef bint stall_overdue(State* e, Op* op, uint64_t older_than, char* name) noexcept nogil
cdef void stall_look_after(State* e, Op* op, uint64_t older_than) noexcept nogil
