"""Reports of a program to its observers: fields of the page of counters, and the ends of its steps."""
from libc.stdint cimport uint32_t

from engine_ext.control.state cimport State
from engine_ext.shared.counters cimport counters_page

cdef counters_page* map_page(int fd) except NULL
cdef int set_fields(counters_page* page, dict fields) except -1

cdef int mark_step(State* e, int number, bint judged) except -1
cdef void note_input(State* e, bint begins) noexcept
cdef void note_collection(State* e, bint begins) noexcept
cdef int record_steps(State* e) except -1
cdef int mark_traffic(State* e, str name, uint32_t every, uint32_t window) except -1
