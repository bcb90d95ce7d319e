"""Who drives the engine, and the one place where it waits."""
from libc.stdint cimport uint32_t, uint64_t

from engine_ext.control.state cimport State
from engine_ext.operations.op cimport Op, Record

cdef struct Goal:           # what a caller waits for: one of
    Op* op                  # its operation is done
    Record* record          # nothing is in flight under a name (pinned)
    bint idle               # nothing is in flight on this rank
    uint32_t joins          # so many joins have ended
    uint64_t drained        # the coordinator has taken in more requests than this

cdef struct Target:           # a record that is pinned, or the text to find or make it by
    Record* record
    const char* text
    uint32_t text_bytes

cdef int driver_start(State* e) noexcept nogil
cdef void driver_stop(State* e) noexcept nogil
cdef int driver_submit(State* e, const Target* target, Op* op) noexcept nogil
cdef int driver_call(State* e, const Target* target, Op* op, uint64_t ns) noexcept nogil
cdef int driver_wait(State* e, const Goal* goal, uint64_t ns) noexcept nogil
cdef void driver_await(State* e, Op* op) noexcept nogil
cdef int driver_join(State* e, uint32_t* join) noexcept nogil
cdef void driver_wait_for_all(State* e, bint on) noexcept nogil
cdef Record* driver_pin(State* e, const char* text, uint32_t text_bytes) noexcept nogil
cdef void driver_unpin(State* e, Record* record) noexcept nogil
