from libc.stdint cimport uint64_t

cdef extern from "engine_ext/platform/clock.h" nogil:
    ctypedef struct patience:
        pass
    uint64_t age_ns(uint64_t now, uint64_t then)
    bint overdue_ns(uint64_t now, uint64_t then, uint64_t limit)
    uint64_t after_ns(uint64_t then, uint64_t ns)
    uint64_t seconds_ns(double seconds)
    void patience_open(patience* p, uint64_t step)
    uint64_t patience_at(const patience* p, uint64_t now)
    uint64_t patience_look(patience* p)
