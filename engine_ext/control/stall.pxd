"""Stalls: finds ranks that keep this one from going on, and ends the world for them."""
from libc.stdint cimport uint64_t

from engine_ext.control.state cimport State
from engine_ext.operations.op cimport Op

cdef bint stall_accuse(State* e, int culprit, const char* text, bint judges) noexcept nogil
cdef void add_stall_line(State* e, const char* line) noexcept nogil
cdef bint all_are_aside(State* e) noexcept nogil
cdef void stall_open(State* e) noexcept nogil
cdef void stall_check(State* e) noexcept nogil
cdef uint64_t stall_deadline(State* e) noexcept nogil
cdef uint64_t stall_watch(State* e, uint64_t seen) noexcept nogil
cdef void stall_look_for_left(State* e) noexcept nogil
cdef void stall_look_after(State* e, Op* op) noexcept nogil
cdef void stall_join(State* e, uint64_t begun) noexcept nogil
