"""Sees ranks die: the native half of the monitor thread."""
from engine_ext.control.state cimport State

cdef int monitor_wait(State* e) noexcept nogil
