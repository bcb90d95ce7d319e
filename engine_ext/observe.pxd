"""What an engine can tell about itself, for logs, tests and files."""
from engine_ext.control.state cimport State

cdef tuple STORES
cdef dict knobs_of(State* e)
cdef dict counters_of(State* e)
cdef list history_of(State* e)
cdef list pending_of(State* e)
cdef list overdue_of(State* e)
cdef list ranks_of(State* e)
