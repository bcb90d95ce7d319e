from libc.stdint cimport uint32_t, uint64_t

cdef extern from "engine_ext/platform/doors.h" nogil:
    enum: DOOR_EVERYBODY
    uint32_t door_count(const uint32_t* door)
    void door_sleep(uint32_t* door, uint32_t count, uint64_t timeout_ns)
    void door_ring(uint32_t* door, int sleepers)
