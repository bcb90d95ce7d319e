"""The coordinator: decides what runs next, and which rank is late. A function of rank 0 that never waits."""
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t, uint8_t

from engine_ext.coordinator.names cimport Names
from engine_ext.coordinator.stores cimport StoreChooser
from engine_ext.operations.kinds cimport can_be_coded, operation_of
from engine_ext.platform.atomics cimport now_ns
from engine_ext.platform.clock cimport patience, seconds_ns
from engine_ext.platform.token_bucket cimport TokenBucket
from engine_ext.shared.counters cimport counters_page
from engine_ext.shared.layout cimport (
    WIRE_BF16, WIRE_FP8, WIRE_TUNED, WIRE_TUNED8, engine_entry, engine_knobs, engine_meta, wire_compresses,
)
from engine_ext.shared.segment cimport Segment, Writer, bit

cdef enum:
    EVICTIONS = 256             # most ids that are freed at a time: each time takes a round of all ranks

cdef struct Request:            # the open request of one rank for a name: fields as in engine_request
    engine_meta meta
    int64_t rows
    uint64_t submitted          # nanoseconds, monotonic, by the coordinator's clock; 0: not known
    bint absent                 # whether it was submitted without a tensor
    char* text                  # malloc'ed: the error of a call that failed on that rank; NULL: no failure

cdef struct FrozenBatch:        # gradients of one optimizer on GPUs that travel together or each alone (frozen.pyx)
    FrozenBatch* next           # the optimizer's next batch
    NameState** members         # malloc'ed, in the order in which they travel
    int32_t count               # number of members
    int32_t here                # number of members that are ready on all ranks and wait for the others
    bint broken                 # whether members travel alone until the end of the round
    uint64_t latest             # when the last of those became ready: nanoseconds, monotonic

cdef struct Optimizer:          # an optimizer whose gradients are on GPUs
    Optimizer* next
    uint32_t number             # engine_request.optimizer
    uint64_t round              # number of its backward passes that have begun, the first being 1
    NameState* names            # list of its gradients, by `sibling`, in no order
    FrozenBatch* batches        # list in order; NULL before its first round has ended
    int32_t came                # number of gradients that became ready in this round
    int32_t frozen              # number of members of all its batches
    bint stale                  # whether the batches are made anew at the end of the round
    uint64_t fusion_threshold   # the knobs with which the batches were made; and the next
    uint8_t compression

# The coordinator's state of a name. A round of a name lasts from its first submission to its entry.
cdef struct NameState:
    NameState* chain            # the first five fields are those of Named
    char* name
    uint32_t name_bytes
    int32_t id
    uint64_t hash
    NameState* next             # next in the list of names with open requests (Coordinator.open), newest first
    bint listed                 # whether this name is in that list
    engine_meta meta            # as the DEFINE entry gave it; valid while id >= 0
    uint64_t nbytes             # bytes of the operation in the queued round
    int absent                  # number of ranks that have no tensor in the queued round
    int64_t* rows               # malloc'ed, allgather: rows by rank in the queued round
    uint64_t used               # sequence of the last entry with this name: the oldest name is evicted first
    Request** requests          # malloc'ed, by rank; NULL: that rank has no open request
    int brought                 # number of open requests
    int failures                # of these, number that announce a failed call: those ranks wait for nothing
    bint aligns                 # whether it is a barrier after which all ranks have equal numbers of unnamed operations
    uint64_t since              # arrival of the first open request that is no failure: nanoseconds of seen time (clock.h)
    bint reported               # whether it has been reported as overdue in this round
    uint64_t ready              # when all ranks had submitted it: nanoseconds, monotonic; 0: this round is not recorded
    uint64_t arrival            # rank that was last in a recorded round, and its lateness, packed (segment.pxd: arrival_last)
    uint64_t closed             # when its last recorded entry was closed: nanoseconds, monotonic
    uint64_t earliest           # earliest submission of any rank, in a round that came as requests: nanoseconds; else 0
    uint64_t latest             # with `earliest`: the last submission, packed as engine_entry.arrival
    uint64_t counted            # time of the last entry on which its arrivals were written: nanoseconds, monotonic
    uint64_t place              # position among rank 0's new names, the first being 1; 0: rank 0 has not requested it yet
    uint32_t number             # engine_request.optimizer of rank 0: 1 + the optimizer's number; 0: not a gradient
    Optimizer* optimizer        # that optimizer, once the name was ready on all ranks; NULL: not yet, or no gradient
    NameState* sibling          # the next gradient of that optimizer
    FrozenBatch* batch          # the frozen batch in which it travels; NULL: it travels alone
    uint64_t round              # the optimizer's round in which it was ready last; 0: none
    bint held                   # whether it is ready on all ranks and waits for the others of its batch

cdef struct Turns:              # turns that one process set has requested from the world's coordinator (turns.pyx)
    Turns* next
    int number                  # number of the process set
    uint64_t wanted             # turns that it has requested and not been given

cdef struct Recording:          # a timeline's recording, for which the coordinator chooses the entries
    uint32_t on                 # atomic: number of the recording in progress; 0: there is none
    uint64_t since              # start of the recording: nanoseconds, monotonic
    uint64_t saved_since        # time from which unused lines have been saved up: nanoseconds, monotonic
    uint64_t rate               # atomic: lines per second that may be written on average

cdef struct Coordinator:
    Segment* segment
    const patience* clock
    Writer writer
    engine_knobs knobs          # in force, and stamped on every entry
    uint64_t tuned              # atomic: number of definitions with WIRE_TUNED or WIRE_TUNED8; the tuner reads it
    uint64_t tuned_coded        # atomic: number of these that travel as fp8 when the knob says so
    StoreChooser[2] choosers    # [0]: uncompressed batches, [1]: compressed ones
    Names names                 # NameStates by text
    NameState** by_id           # NameStates by id; NULL: the id is free
    NameState* open             # first of the list of names with open requests
    int32_t* free_ids           # stack of free ids
    int32_t free_count          # number of ids on it
    int32_t[EVICTIONS] evicting     # ids with an EVICT entry that some rank has not executed yet
    int evicting_count
    uint64_t evicted_at         # schedule position behind the last EVICT entry: the ids are free when every cursor has passed it
    int32_t clock_hand          # id at which the last search for names to evict ended
    uint64_t* phase             # by id, a bit: the value of the readiness bit that means "not submitted"
    uint64_t* queued            # by id, a bit: the name is in `queue`, or held in a frozen batch
    uint64_t* defined           # by id, a bit: a DEFINE entry has given it to a name
    int32_t words               # number of words in use of these arrays, and of the ranks' arrays of bits
    int32_t* queue              # the open batch: ids that are ready on all ranks and not scheduled, in order of discovery
    int32_t* scratch            # room for as many ids as `queue` has, for splitting it
    int32_t queue_count
    uint64_t queue_bytes        # bytes of the tensors in the open batch
    uint64_t queue_since        # when its first tensor was ready on all ranks: nanoseconds, monotonic
    uint64_t* scanned           # by rank, atomic: arrivals + waits of its page at the last scan
    uint64_t* request_tail      # by rank: bytes read from its request ring since the start
    bint drained                # whether requests were read since the last pass: ranks may wait for room in their rings
    bint append_again           # whether something is left that the schedule had no room for: the next step tries again
    bint* joined                # by rank: whether it has joined; it then counts as having submitted everything
    int joined_count            # number of ranks that have joined
    int last_joined             # the rank that joined last, as far as was seen
    uint64_t resume_at          # schedule position behind a JOINED entry: no bits are read before all cursors pass it; 0: none
    uint64_t now                # time of the step under way: nanoseconds, monotonic; 0: not read yet
    uint64_t step               # number of optimizer steps of the coordinator's rank at the last look
    uint64_t step_items         # tensors scheduled in this step
    uint64_t usual_items        # tensors scheduled in the step before
    bint freezes                # whether gradients on GPUs travel in frozen batches; else sums depend on what travels together
    Optimizer* optimizers       # list of the optimizers that have such gradients
    uint64_t places             # number of new names that rank 0 has requested
    int32_t held                # number of names that are held in frozen batches
    uint64_t hold_ns            # how long after its latest member a frozen batch is held, though ranks wait for all of it
    uint64_t looked             # when held batches were last looked at: nanoseconds, monotonic
    Turns* turns                # list of process sets that have requested turns; the world's coordinator alone
    uint64_t turns_wanted       # sum of their `wanted`
    const Recording* timeline   # that of the coordinator's rank; it says how much to record
    counters_page* counters_page  # that of the coordinator's rank; NULL: nothing is counted
    uint64_t counting           # when the counting began or ended: nanoseconds, monotonic
    TokenBucket recorded             # budget of lines that the timeline may still take
    bint recording              # whether tensors that become ready now are recorded

cdef int coordinator_open(Coordinator* c, Segment* segment, const patience* clock, const engine_knobs* knobs) noexcept nogil
cdef void coordinator_close(Coordinator* c) noexcept nogil
cdef bint coordinator_step(Coordinator* c) noexcept nogil
cdef void open_queue(Coordinator* c, NameState* name) noexcept nogil
cdef void coordinator_set_knobs(Coordinator* c, const engine_knobs* knobs) noexcept nogil
cdef uint64_t coordinator_deadline(Coordinator* c) noexcept nogil
cdef bint coordinator_unseen(Coordinator* c) noexcept nogil
cdef uint64_t coordinator_look_at(const Coordinator* c, uint64_t warning_ns, uint64_t limit_ns) noexcept nogil
cdef int coordinator_absentee(Coordinator* c, uint64_t seen, uint64_t limit_ns, char* text, int room) noexcept nogil

cdef inline uint64_t time_of_step(Coordinator* c) noexcept nogil:
    """Return the time of the step under way, nanoseconds. The clock is read once a step: reading costs as much as a scan."""
    if c.now == 0:
        c.now = now_ns()
    return c.now

cdef inline bint withheld(Coordinator* c, NameState* name, int rank) noexcept nogil:
    """Return whether `rank` has not submitted a name that may be in flight on other ranks."""
    return name.requests[rank] == NULL and not c.joined[rank] and (
        name.id < 0 or bit(c.segment.pages[rank].ready, name.id) == bit(c.phase, name.id))

cdef inline uint64_t cycle_ns(const Coordinator* c) noexcept nogil:
    return seconds_ns(c.knobs.cycle_time_ms / 1e3)


cdef inline bint wanted(const NameState* name) noexcept nogil:
    """Return whether some rank has requested a name and may wait for it."""
    return name.brought > name.failures

cdef inline int32_t waiting(const Coordinator* c) noexcept nogil:
    """Return how many names are ready on all ranks and not scheduled yet."""
    return c.queue_count + c.held

cdef inline bint is_frozen(const Coordinator* c, const NameState* name) noexcept nogil:
    """Return whether a name travels only in its frozen batch or alone, and never with other names that are ready."""
    return name.meta.device and name.number != 0 and c.freezes and operation_of(&name.meta).reduces

cdef inline void stamp(Coordinator* c, engine_entry* entry) noexcept nogil:
    """Write the knobs in force on an entry: all ranks see a change at the same entry."""
    entry.knobs = c.knobs

cdef inline uint8_t wire_now(const Coordinator* c, const engine_meta* meta) noexcept nogil:
    """Return `wire` of an entry that is appended now: the metadata's, or the knob's. Only reductions compress. fp8 is a format
    between hosts: on one host nothing is coded. A knob of fp8 means bf16 for what must not or cannot be coded."""
    cdef uint8_t wire = meta.wire
    if not operation_of(meta).reduces:
        return 0
    if wire == WIRE_TUNED or wire == WIRE_TUNED8:
        wire = c.knobs.compression
        if wire == WIRE_FP8 and c.segment.hosts > 1 and not (meta.wire == WIRE_TUNED8 and can_be_coded(meta)):
            wire = WIRE_BF16
    if (wire == WIRE_FP8 and c.segment.hosts == 1) or (meta.group == 0 and not wire_compresses(wire, meta.dtype)):
        return 0
    return wire
