"""Who owns an operation of this rank, and what it keeps alive."""
from engine_ext.control.state cimport State
from engine_ext.operations.op cimport Op

cdef void keep_alive(Op* op, object owner) noexcept
cdef void abandon(State* e, Op* op) noexcept
cdef void let_go(State* e, Op* op) noexcept
cdef void bury(State* e) noexcept
