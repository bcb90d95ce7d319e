"""Execution of the schedule on this rank, entry by entry."""
from engine_ext.control.state cimport State

cdef bint run_schedule(State* e) noexcept nogil
cdef void fail_everything(State* e) noexcept nogil
