"""The engines of one process, and the thread that drives them while nobody waits."""
from engine_ext.control.state cimport State

cdef int engines_enter(State* e) noexcept nogil
cdef void engines_leave(State* e) noexcept nogil
