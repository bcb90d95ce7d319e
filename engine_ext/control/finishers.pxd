"""Threads that end native calls: a framework's callback may run a whole program, and the thread that moves data must not."""
from engine_ext.operations.op cimport Op

cdef bint finishers_start() noexcept nogil
cdef void finishers_add(Op* op) noexcept nogil
cdef void finishers_forked() noexcept nogil
