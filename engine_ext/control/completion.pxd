"""Ends of operations: marks them done, and wakes their waiters."""
from engine_ext.control.state cimport State
from engine_ext.operations.op cimport Op

cdef void raise_event(State* e, int event) noexcept nogil
cdef void complete_op(State* e, Op* op) noexcept nogil
cdef void end_step(State* e, int number) noexcept nogil
cdef void wake_waiters(State* e) noexcept nogil
cdef void wake_any_waiter(State* e) noexcept nogil
