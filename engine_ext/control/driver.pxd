"""The driver's role, and the one place where the engine waits."""
from libc.stdint cimport uint32_t, uint64_t

from engine_ext.control.state cimport State
from engine_ext.operations.op cimport Op, Record

# What a caller waits for: a union. is_goal_met tests the fields in this order, and the first that is set decides. A failure of
# the world meets every goal; without a field that is set, `drained` counts as set.
cdef struct Goal:
    Op* op                  # met when this operation is done, whatever its status
    Record* record          # met when nothing is in flight under this name, which is pinned by the caller
    bint idle               # met when nothing is in flight on this rank and its backlog is empty
    uint32_t joins          # met when at least so many joins have ended; 0: not set
    uint64_t drained        # met when the coordinator has read more bytes than this of this rank's request ring

cdef enum:
    LABEL_BYTES = 48            # bytes of the generated name of an unnamed operation, with its final zero

cdef struct Target:         # the name of a submission: a pinned record, or else the text by which to find or make the record
    Record* record          # NULL: `text` counts
    const char* text        # NULL, and no record: an unnamed operation, the next of its kind; its name goes into `label`
    uint32_t text_bytes
    char[LABEL_BYTES] label

cdef enum:
    NEVER = 0                   # a time at which to look again: there is none. Not the NEVER of monitor.pyx, 2^64 - 1

cdef bint is_due(const State* e) noexcept nogil
cdef bint drive_unattended(State* e) noexcept nogil
cdef void announce_sleep(State* e, uint32_t door, uint32_t count) noexcept nogil
cdef uint64_t remaining_ns(uint64_t when) noexcept nogil
cdef void driver_stop(State* e) noexcept nogil
cdef void driver_answer(State* e) noexcept nogil
cdef int driver_submit(State* e, Target* target, Op* op) noexcept nogil
cdef int driver_submit_and_drive(State* e, Target* target, Op* op) noexcept nogil
cdef int driver_call(State* e, Target* target, Op* op, uint64_t ns) noexcept nogil
cdef void driver_note_thread(State* e) noexcept nogil
cdef void driver_note_done(State* e) noexcept nogil
cdef uint32_t driver_label(char* label, int kind, uint64_t number) noexcept nogil
cdef void driver_count_unnamed(State* e, int kind, uint64_t count) noexcept nogil
cdef int driver_wait(State* e, const Goal* goal, uint64_t ns) noexcept nogil
cdef void driver_await(State* e, Op* op) noexcept nogil
cdef int driver_join(State* e, uint32_t* join) noexcept nogil
cdef void driver_wait_for_all(State* e, bint on) noexcept nogil
cdef Record* driver_pin(State* e, const char* text, uint32_t text_bytes) noexcept nogil
cdef void driver_unpin(State* e, Record* record) noexcept nogil
