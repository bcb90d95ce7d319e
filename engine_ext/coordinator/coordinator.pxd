"""The coordinator: what runs next, and who is late. A function of rank 0 that never waits."""
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t, uint8_t

from engine_ext.coordinator.names cimport Names
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
    EVICTIONS = 256             # most ids that are freed at a time: each time costs a round of all ranks

cdef struct Request:            # one rank's open request for a name: fields as in engine_request
    engine_meta meta
    int64_t rows
    uint64_t submitted          # nanoseconds, monotonic; 0: the rank did not say
    bint absent                 # whether it was submitted without a tensor
    char* text                  # malloc'ed: the error of a call that failed on that rank; NULL: it did not fail

cdef struct FrozenBatch:        # gradients of one optimizer on GPUs, which travel together or each alone: frozen.pyx
    FrozenBatch* next           # the optimizer's next one
    NameState** members         # malloc'ed, in the order in which they travel
    int32_t count               # number of members
    int32_t here                # number of those that are ready on all ranks and wait for the others
    bint broken                 # whether members travel alone until the round's end
    uint64_t latest             # nanoseconds, monotonic: when the last of those that are here became ready

cdef struct Optimizer:          # one whose gradients are on GPUs
    Optimizer* next
    uint32_t number             # engine_request.optimizer
    uint64_t round              # number of its backward passes that have begun, the first being 1
    NameState* names            # first of the list of its gradients, in no order
    FrozenBatch* batches        # in order; NULL before its first round has ended
    int32_t came                # number of gradients that became ready in this round
    int32_t frozen              # number of members of all its batches
    bint stale                  # whether the batches are to be made anew when the round ends
    uint64_t fusion_threshold   # the knobs for which the batches were made
    uint8_t compression

cdef struct NameState:          # what the coordinator knows of a name. A round lasts from a name's first submission to its entry
    NameState* chain            # this and the next four as in Named
    char* name
    uint32_t name_bytes
    int32_t id
    uint64_t hash
    NameState* next             # the next in the list of names with open requests (Coordinator.open), newest first
    bint listed                 # whether this name is in that list
    engine_meta meta            # as the DEFINE entry gave it; valid while id >= 0
    uint64_t nbytes             # bytes of the operation in the queued round
    int absent                  # number of ranks without a tensor in the queued round
    int64_t* rows               # malloc'ed, allgather: rows by rank in the queued round
    uint64_t used               # sequence of the entry that last carried it: the oldest name is evicted first
    Request** requests          # by rank; NULL: that rank has no open request
    int brought                 # number of open requests
    int failures                # number of them that announce a failed call: those ranks wait for nothing
    bint aligns                 # whether it is a barrier behind which ranks make their numbers of unnamed operations equal
    uint64_t since              # arrival of the first open request without a failure: nanoseconds of seen time (clock.h)
    bint reported               # whether it has been reported as overdue in this round
    uint64_t ready              # nanoseconds, monotonic: when all ranks had submitted it; 0: this round is not recorded
    uint64_t arrival            # the rank that was last in a recorded round, and its lateness, packed: see lateness.pxd
    uint64_t closed             # nanoseconds, monotonic: when its last recorded entry was closed
    uint64_t earliest           # nanoseconds: earliest submission over ranks in a round that came as requests; else 0
    uint64_t place              # which of rank 0's new names it was, the first being 1; 0: rank 0 has not requested it yet
    uint32_t number             # engine_request.optimizer of rank 0: whose gradient it is; 0: nobody's
    Optimizer* optimizer        # the same, once it was ready on all ranks; NULL: not yet, or it is nobody's
    NameState* sibling          # the next gradient of that optimizer
    FrozenBatch* batch          # in which it travels; NULL: alone
    uint64_t round              # the optimizer's round in which it was ready last; 0: none
    bint held                   # whether it is ready on all ranks and waits for the others of its batch

cdef struct Turns:              # what the world's coordinator knows of a process set with tensors on GPUs: turns.pyx
    Turns* next
    int number                  # of the set
    uint64_t wanted             # turns that it has asked for and not been given

cdef enum:
    CLASSES = 48            # one for each power of two of a batch's bytes

cdef struct StoreChooser:       # cached or streaming stores, by size of batch: fusion.pyx
    double best[CLASSES][2]     # nanoseconds per byte, decaying minimum; 0: never measured
    uint64_t uses[CLASSES]

cdef struct Recording:          # of a timeline, for which the coordinator chooses the entries
    uint32_t on                 # atomic: number of the recording in progress; 0: there is none
    uint64_t since              # when it began: nanoseconds, monotonic
    uint64_t saved_since        # time from which unused lines have been saved up
    uint64_t rate               # atomic: lines a second that may be written on average

cdef struct Coordinator:
    Segment* segment
    const patience* clock
    Writer writer
    engine_knobs knobs          # in force: stamped on every entry
    uint64_t tuned              # atomic: number of definitions with WIRE_TUNED or WIRE_TUNED8
    uint64_t tuned_coded        # atomic: of these, those that a knob of fp8 has travel so
    StoreChooser[2] choosers    # [0] for uncompressed batches, [1] for compressed ones
    Names names                 # NameState by text
    NameState** by_id           # NULL: the id is free
    NameState* open             # first of the list of names with open requests
    int32_t* free_ids           # stack of ids to give
    int32_t free_count          # ids on it
    int32_t[EVICTIONS] evicting     # ids whose EVICT entries some rank has not executed yet
    int evicting_count
    uint64_t evicted_at         # schedule position of the last EVICT entry: ids are free when every cursor has passed it
    int32_t clock_hand          # id at which the last search for names to evict ended
    uint64_t* phase             # bit by id: the value of readiness bits that means not submitted
    uint64_t* queued            # bit by id: in `queue`
    uint64_t* defined           # bit by id: given to a name, by a DEFINE entry
    int32_t words               # words in use of these and of the ranks' bit words
    int32_t* queue              # the open batch: ids ready on all ranks, not yet scheduled, in order of discovery
    int32_t* scratch            # of the size of `queue`, for splitting it
    int32_t queue_count
    uint64_t queue_bytes        # bytes of the tensors in the open batch
    uint64_t queue_since        # nanoseconds, monotonic: when its first tensor was ready on all ranks
    uint64_t* scanned           # by rank: arrivals + waits of its page at the last scan
    uint64_t* request_tail      # by rank: bytes read from its request ring since the start
    bint drained                # whether requests were read since the last pass: ranks may wait for room in their rings
    bint append_again           # the schedule was full for something: the next step tries again
    bint* joined                # by rank: whether it has joined, so that it counts as having submitted everything
    int joined_count            # number of ranks that have
    int last_joined             # the rank that was seen to join last
    uint64_t resume_at          # schedule position behind a JOINED entry: no bits are read until all cursors pass it; 0: none
    uint64_t now                # nanoseconds, monotonic: the time of the step under way; 0: nobody has asked for it yet
    uint64_t step               # number of optimizer steps of the coordinator's rank at the last look
    uint64_t step_items         # tensors scheduled in this step
    uint64_t usual_items        # tensors scheduled in the step before
    bint freezes                # whether gradients on GPUs travel in frozen batches: their sums depend on what travels together
    Optimizer* optimizers       # those that have such gradients
    uint64_t places             # number of new names that rank 0 has requested
    int32_t held                # number of names that wait in frozen batches
    uint64_t hold_ns            # how long after its latest member a frozen batch is held, though ranks wait for all of it
    uint64_t looked             # nanoseconds, monotonic: when these were last looked at
    Turns* turns                # process sets that have asked for turns, the world's alone
    uint64_t turns_wanted       # of all of them together, that were not given
    const Recording* timeline   # that of the coordinator's rank, which says how much to record
    counters_page* counters_page  # that of the coordinator's rank; NULL: nothing is counted
    TokenBucket recorded             # lines that the timeline may still take
    bint recording              # whether tensors that become ready now are recorded

cdef int coordinator_open(Coordinator* c, Segment* segment, const patience* clock, const engine_knobs* knobs) noexcept nogil
cdef void coordinator_close(Coordinator* c) noexcept nogil
cdef bint coordinator_step(Coordinator* c) noexcept nogil
cdef void open_queue(Coordinator* c, NameState* name) noexcept nogil
cdef void coordinator_turn(Coordinator* c, const engine_knobs* knobs) noexcept nogil
cdef uint64_t coordinator_deadline(Coordinator* c) noexcept nogil
cdef bint coordinator_unseen(Coordinator* c) noexcept nogil
cdef uint64_t coordinator_look_at(const Coordinator* c, uint64_t warning_ns, uint64_t limit_ns) noexcept nogil
cdef int coordinator_absentee(Coordinator* c, uint64_t seen, uint64_t limit_ns, char* text, int room) noexcept nogil

cdef inline uint64_t time_of_step(Coordinator* c) noexcept nogil:
    """The time of the step under way, nanoseconds: the clock is read once in it, since reading costs as much as a scan."""
    if c.now == 0:
        c.now = now_ns()
    return c.now

cdef inline bint withheld(Coordinator* c, NameState* name, int rank) noexcept nogil:
    """Whether `rank` has not submitted a name that may be in flight on others."""
    return name.requests[rank] == NULL and not c.joined[rank] and (
        name.id < 0 or bit(c.segment.pages[rank].ready, name.id) == bit(c.phase, name.id))

cdef inline uint64_t cycle_ns(const Coordinator* c) noexcept nogil:
    return seconds_ns(c.knobs.cycle_time_ms / 1e3)


cdef inline bint wanted(const NameState* name) noexcept nogil:
    """Whether a rank has requested a name, and may wait for it."""
    return name.brought > name.failures

cdef inline int32_t waiting(const Coordinator* c) noexcept nogil:
    """How many names are ready on all ranks and not scheduled yet."""
    return c.queue_count + c.held

cdef inline bint is_frozen(const Coordinator* c, const NameState* name) noexcept nogil:
    """Whether a name travels in its frozen batch or alone, and never with whatever else is ready."""
    return name.meta.device and name.number != 0 and c.freezes and operation_of(&name.meta).reduces

cdef inline void stamp(Coordinator* c, engine_entry* entry) noexcept nogil:
    """Write the knobs in force on an entry: all ranks see a change at the same one."""
    entry.knobs = c.knobs

cdef inline uint8_t wire_now(const Coordinator* c, const engine_meta* meta) noexcept nogil:
    """`wire` of an entry that is appended now: the metadata's, or the knob's. Only reductions compress. fp8 is a format between
    hosts: on one host nothing is coded. A knob of it is bf16 for what must not or cannot be coded."""
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
