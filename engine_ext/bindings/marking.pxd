"""What a program says of its steps, and what the tuner takes for their ends."""
from libc.stdint cimport uint32_t

from engine_ext.control.state cimport State

cdef int mark_step(State* e, int number) except -1
cdef int record_steps(State* e) except -1
cdef int mark_traffic(State* e, str name, uint32_t every, uint32_t window) except -1
