"""The coordinator: what runs next, and who is late. A function of rank 0 that never waits."""
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t, uint8_t

from engine_ext.control.names cimport Names
from engine_ext.control.store_choice cimport StoreChooser
from engine_ext.control.table cimport bit
from engine_ext.control.trace cimport Budget, Trace
from engine_ext.operations.kinds cimport operation_of
from engine_ext.platform.clock cimport patience, seconds_ns
from engine_ext.shared.counters cimport counters_page
from engine_ext.shared.layout cimport WIRE_TUNED, engine_entry, engine_knobs, engine_meta
from engine_ext.shared.schedule cimport Writer
from engine_ext.shared.segment cimport Segment

cdef enum:
    EVICTIONS = 256             # ids freed at a time: each time costs a round of all ranks

cdef struct Request:
    engine_meta meta
    int64_t rows
    uint64_t submitted          # nanoseconds
    bint absent
    char* text                  # malloc'ed: how the rank's call failed; NULL: it did not

cdef struct NameState:
    NameState* chain                 # this and the next four as in Named
    char* name
    uint32_t name_bytes
    int32_t id
    uint64_t hash
    NameState* next                  # list of names with open requests
    bint listed
    engine_meta meta            # as defined, when id >= 0
    uint64_t nbytes             # of the round that is queued
    int absent                  # ranks that bring no tensor to it
    int64_t* rows               # allgather: rows of each rank in it
    uint64_t used               # entry that last carried it: the oldest is evicted first
    Request** requests          # by rank; NULL where that rank has none open
    int brought                 # how many ranks have
    int failures                # in how many of those requests the rank's call has failed: they wait for nothing
    bint aligns                 # a barrier behind which ranks have brought the same operations without a name
    uint64_t since              # nanoseconds, as rank 0 has seen time pass: when the first open request came that is no failure
    bint reported               # as overdue
    uint64_t ready              # nanoseconds: when all had brought it, in a round that is recorded; or 0
    uint64_t arrival            # then, who was last: see lateness.pyx
    uint64_t closed             # when it last travelled in a recorded entry
    uint64_t earliest           # nanoseconds: when the first rank brought it, in a round that requests have brought; else 0

cdef struct Coordinator:
    Segment* segment
    const patience* clock
    Writer writer
    engine_knobs knobs          # in force
    uint64_t tuned              # atomic: definitions of names with WIRE_TUNED
    StoreChooser[2] choosers    # for batches that travel as they are, and for compressed ones
    Names names
    NameState** by_id
    NameState* open                  # names with open requests
    int32_t* free_ids           # a stack
    int32_t free_count
    int32_t[EVICTIONS] evicting     # ids between their EVICT entries and the last cursor passing the last of them
    int evicting_count
    uint64_t evicted_at
    int32_t clock_hand
    uint64_t* phase             # bits
    uint64_t* queued
    uint64_t* defined
    int32_t words               # bit words in use
    int32_t* queue              # ids ready on all ranks, not yet scheduled, in order of discovery
    int32_t* rest               # scratch of the same size
    int32_t queue_count
    uint64_t queue_bytes
    uint64_t queue_since        # nanoseconds
    uint64_t* seen              # arrivals + waits of each rank at the last scan
    uint64_t* request_tail      # bytes drained of each rank's request ring
    bint drained                # requests were taken in: their ranks may wait for room
    bint stuck                  # something could not be appended: try again at the next step
    bint* joined                # by rank: it brings nothing, and takes part all the same
    int joined_count
    uint64_t resume_at          # position behind the last JOINED entry: until all cursors have passed it, nothing is looked at
    uint64_t step               # rank 0's steps at the last look
    uint64_t step_items         # tensors scheduled since it
    uint64_t usual_items        # tensors scheduled in the step before
    const Trace* trace          # rank 0's, from which it learns how much to record
    counters_page* counters_page  # rank 0's, or NULL
    Budget recorded             # lines of the timeline
    bint recording              # what becomes ready now

cdef int coordinator_open(Coordinator* c, Segment* segment, const patience* clock, const engine_knobs* knobs) noexcept nogil
cdef void coordinator_close(Coordinator* c) noexcept nogil
cdef bint coordinator_step(Coordinator* c) noexcept nogil
cdef void coordinator_turn(Coordinator* c, const engine_knobs* knobs) noexcept nogil
cdef uint64_t coordinator_deadline(Coordinator* c) noexcept nogil
cdef bint coordinator_unseen(Coordinator* c) noexcept nogil
cdef uint64_t coordinator_look_at(const Coordinator* c, uint64_t warning_ns, uint64_t limit_ns) noexcept nogil
cdef int coordinator_absentee(Coordinator* c, uint64_t seen, uint64_t limit_ns, char* text, int room) noexcept nogil

cdef inline bint withheld(Coordinator* c, NameState* name, int rank) noexcept nogil:
    """Whether `rank` has not brought a name that may be in flight on others."""
    return name.requests[rank] == NULL and not c.joined[rank] and (
        name.id < 0 or bit(c.segment.pages[rank].ready, name.id) == bit(c.phase, name.id))

cdef inline uint64_t cycle_ns(const Coordinator* c) noexcept nogil:
    return seconds_ns(c.knobs.cycle_time_ms / 1e3)


cdef inline bint wanted(const NameState* name) noexcept nogil:
    """Whether a rank has requested a name, and may wait for it."""
    return name.brought > name.failures

cdef inline void stamp(Coordinator* c, engine_entry* entry) noexcept nogil:
    """The knobs in force, on every entry: all ranks see a change at the same one."""
    entry.knobs = c.knobs

cdef inline uint8_t wire_now(const Coordinator* c, const engine_meta* meta) noexcept nogil:
    """`wire` of an entry that is appended now: the metadata's, or the knob's. What is gathered is never compressed."""
    if not operation_of(meta).reduces:
        return 0
    return c.knobs.compression if meta.wire == WIRE_TUNED else meta.wire
