"""Detection of dead ranks and of GPUs that stand still: the native half of the monitor thread."""
from libc.stdint cimport uint64_t

from engine_ext.control.state cimport State

cdef int monitor_wait(State* e) noexcept nogil

cdef uint64_t device_watch(State* e, uint64_t seen) noexcept nogil
