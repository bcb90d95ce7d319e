"""Cython's view of the run delay of a thread (task_times.h)."""
from libc.stdint cimport uint64_t

cdef extern from "engine_ext/platform/task_times.h" nogil:
    int task_times_open()
    uint64_t task_times_thread()
    bint task_times_delay(int fd, uint64_t* ns)
