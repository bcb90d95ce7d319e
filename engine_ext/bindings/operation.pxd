"""An operation of one rank, from its making to its end."""
from engine_ext.bindings.memory cimport Memory
from engine_ext.control.state cimport State
from engine_ext.control.table cimport Op

cdef Op* new_op() except NULL
cdef void keep_alive(Op* op, object owner) noexcept
cdef Memory take_memory(Op* op)
cdef void free_op(Op* op) noexcept
cdef void abandon(Op* op) noexcept
cdef void bury(State* e) noexcept
