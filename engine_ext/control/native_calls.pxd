"""Native calls: the backlog of those that wait for room, and the finisher threads on which calls end."""
from libc.stdint cimport uint64_t

from engine_ext.control.state cimport State
from engine_ext.operations.op cimport Op, Record

cdef bint finishers_start() noexcept nogil
cdef void finishers_add(Op* op) noexcept nogil
cdef void finishers_forked() noexcept nogil

cdef void backlog_add(State* e, Record* record, Op* op) noexcept nogil
cdef bint backlog_submit(State* e) noexcept nogil
cdef Op* backlog_take_overdue(State* e, uint64_t seen) noexcept nogil
cdef Op* backlog_take(State* e) noexcept nogil
