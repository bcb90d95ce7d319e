"""The reactions of the observers to events. observers.pxd says who reports each event, and whether the lock is held."""
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset, strncpy

from engine_ext.control.overlap cimport Overlap, overlap_entry_begins, overlap_entry_ends
from engine_ext.control.state cimport HISTORY, HISTORY_NAME, UNFINISHED, UNFINISHED_NAME, Row, Unfinished
from engine_ext.control.step_clock cimport (
    LateStep, step_clock_close, step_clock_entry, step_clock_forked, step_clock_mark, step_clock_open, step_clock_switch,
)
from engine_ext.control.trace cimport (
    SOURCE_TRAFFIC, add_step_mark, close_step_marks, count_towards_mark, trace_close, trace_entry, trace_entry_begins,
    trace_entry_ends, trace_late_step, trace_sample, trace_step,
)
from engine_ext.hosts.connections cimport traffic_count
from engine_ext.operations.kinds cimport operation_of, wire_bytes
from engine_ext.operations.op cimport OP_STAND_IN, Op, Record, fails
from engine_ext.operations.operation cimport Operation
from engine_ext.platform.atomics cimport now_ns, store32_relaxed, store32_release
from engine_ext.platform.clock cimport after_ns, age_ns
from engine_ext.shared.counters cimport (
    COUNTED_FAILED, COUNTED_RESETTING, GROUPS, STAGE_NCCL, STAGES, counters_arrival, counters_entry, counters_find_place,
    counters_late_step, counters_name_group, counters_step,
)
from engine_ext.shared.layout cimport (
    ALGORITHM_BLOCKS, ENTRY_BATCH, ENTRY_FROZEN, ENTRY_SKIP, WIRE_FP8, WIRE_NONE, engine_knobs, entry_ids,
)
from engine_ext.shared.segment cimport arrival_last, arrival_late_us, from_coordinator_time

cdef enum:
    COUNT_AGAIN_NS = 1000000000     # nanoseconds after which the count of overdue operations is written again


# ---- an engine's life -------------------------------------------------------------------------------------------------------

cdef void observers_open(State* e, counters_page* page) noexcept nogil:
    """Begin to observe, counting into `page`; NULL: nothing is counted."""
    cdef int place
    e.coordinator.timeline = &e.trace.recording
    store32_relaxed(&e.group_place, 0)
    if page != NULL and e.world == e:
        for place in range(GROUPS):     # groups of an earlier world have ended
            counters_name_group(page, place, b"", 0)
        e.step_clock = step_clock_open()
    observers_count(e, page)


cdef void observers_count(State* e, counters_page* page) noexcept nogil:
    """Count into `page` from now on; NULL: nothing is counted."""
    pthread_mutex_lock(&e.lock)
    e.counters_page = e.coordinator.counters_page = page
    e.coordinator.counting = now_ns()
    memset(&e.overlap, 0, sizeof(Overlap))
    pthread_mutex_unlock(&e.lock)
    step_clock_switch(e.step_clock, page != NULL)       # of the world alone
    if coordinates(&e.segment):
        store32_release(&e.segment.coordinator.recording, page != NULL or load32_relaxed(&e.trace.recording.on))


cdef void observers_name_group(State* e, const char* text, uint64_t nbytes) noexcept nogil:
    """Count this process set under a name of its own, too, if the page has a free place."""
    cdef uint32_t place
    pthread_mutex_lock(&e.world.lock)
    if e.counters_page != NULL and e.world != e and nbytes:
        place = load32_relaxed(&e.group_place)
        if place == 0:
            place = <uint32_t>(1 + counters_find_place(e.counters_page, e.segment.size))
            store32_relaxed(&e.group_place, place)
        if place:
            counters_name_group(e.counters_page, place - 1, text, nbytes)
    pthread_mutex_unlock(&e.world.lock)


cdef void observers_leave_group(State* e) noexcept nogil:
    """Free the place in which this process set was counted. A thread that is stuck in the set may still count there."""
    cdef uint32_t place
    pthread_mutex_lock(&e.world.lock)
    place = load32_relaxed(&e.group_place)
    if e.counters_page != NULL and place:
        counters_name_group(e.counters_page, place - 1, b"", 0)
    pthread_mutex_unlock(&e.world.lock)


cdef void count_completed(State* e, uint64_t operations) noexcept nogil:
    """Count operations of this rank that have ended. There is a page of counters."""
    tally(e.counters_page.completed, operations)
    tally_group(e, e.counters_page.group_completed, operations)


cdef void observers_forked(State* e) noexcept nogil:
    """Close the files of the observers in a forked child."""
    step_clock_forked(e.step_clock)


cdef void observers_close(State* e, bint alive) noexcept nogil:
    """Free the memory of the observers. Not `alive`: in a forked child, whose locks and numbers of files may be anyone's."""
    step_clock_close(e.step_clock, alive)
    e.step_clock = NULL
    trace_close(&e.trace)
    close_step_marks(&e.marks)


# ---- an entry of the schedule -----------------------------------------------------------------------------------------------

cdef void open_history_row(State* e, const engine_entry* entry) noexcept nogil:
    """Begin a row of the flight record; it is open until the entry ends."""
    cdef Row* row = &e.history[e.rows % HISTORY]
    cdef Record* record
    memset(row, 0, sizeof(Row))
    row.sequence, row.type, row.kind = entry.sequence, entry.type, entry.kind
    row.algorithm, row.stores, row.items, row.nbytes = entry.algorithm, entry.stores, entry.items, entry.bytes
    row.knob_version, row.wire, row.started = entry.knobs.version, entry.meta.wire, e.entry_begun
    row.frozen = entry.flags & ENTRY_FROZEN != 0
    if entry.type == ENTRY_BATCH or entry.type == ENTRY_SKIP:
        record = e.table.by_id[entry_ids(entry)[0]]
        if record != NULL:
            strncpy(row.name, record.name, HISTORY_NAME - 1)
    elif entry.name_bytes:
        memcpy(row.name, <const char*>entry + sizeof(engine_entry), min(entry.name_bytes, <int32_t>HISTORY_NAME - 1))
    e.rows += 1


cdef void count_knobs(counters_page* page, const engine_knobs* knobs) noexcept nogil:
    """Write the knobs in force into the page."""
    store_relaxed(page.knob_version, knobs.version)
    store_relaxed(page.fusion_threshold, knobs.fusion_threshold)
    store_relaxed(page.cycle_time_ns, <uint64_t>(knobs.cycle_time_ms * 1e6))
    store_relaxed(page.stores, knobs.stores)
    store_relaxed(page.chunk, knobs.chunk_bytes)
    store_relaxed(page.compression, knobs.compression)
    store_relaxed(page.sockets_per_lane, knobs.sockets_per_lane)
    store_relaxed(page.between_hosts, knobs.between_hosts)


cdef void observe_entry_begins(State* e, const engine_entry* entry) noexcept nogil:
    """Note that this rank begins an entry of any type, at `entry_begun`."""
    open_history_row(e, entry)
    e.traffic.waited = 0
    if load32_relaxed(&e.trace.recording.on):
        trace_entry_begins(&e.trace, e.entry_begun)
    if e.counters_page != NULL:
        overlap_entry_begins(&e.overlap, e.entry_begun)
        if e.world == e:
            count_knobs(e.counters_page, &entry.knobs)


cdef inline uint64_t arrival_since(const State* e, const engine_entry* entry, const Op* op) noexcept nogil:
    """Return the time from which this rank counts as late with `op`: the first rank's submission, or, if later, the time when
    earlier results had reached the program here. Late results are the network's fault. 0: not known."""
    cdef uint64_t earliest = from_coordinator_time(&e.segment, entry.earliest)
    return max(earliest, op.unblocked) if earliest else 0


cdef void count_compression(State* e, const engine_entry* entry) noexcept nogil:
    """Count what compression saved of the operations in `batch`, which have travelled compressed. There is a page of counters."""
    cdef int64_t saved = 0
    cdef uint32_t i
    for i in range(entry.items if entry.meta.wire != WIRE_FP8 or entry.algorithm == ALGORITHM_BLOCKS else 0):    # else float32
        saved += wire_bytes(&e.batch[i].meta, WIRE_NONE) - wire_bytes(&e.batch[i].meta, entry.meta.wire)
    tally(e.counters_page.compression_saved_bytes, <uint64_t>saved)
    if entry.meta.wire == WIRE_FP8:
        tally(e.counters_page.compression_not_finite, e.executor.blocks.not_finite)


cdef void clock_entry(State* e, const engine_entry* entry, const Op* last) noexcept nogil:
    """Tell the clock of steps for which rank this one has waited in an entry, and how much later than here that one submitted
    it. Where the coordinator's clock is not known, it is as much later as than the first rank. There is a clock."""
    cdef int rank = arrival_last(entry.arrival)
    cdef uint64_t late = arrival_late_us(entry.arrival) * 1000, earliest = from_coordinator_time(&e.segment, entry.earliest)
    if 0 <= rank < e.segment.size:
        if earliest:
            late = age_ns(earliest + late, last.submitted)
        step_clock_entry(e.world.step_clock, e.segment.numbers[rank] if rank != e.segment.rank else -1, late, last.submitted,
                         entry.meta.device != 0, e.segment.hosts > 1)


cdef void observe_completions(State* e, const engine_entry* entry) noexcept nogil:
    """Note that the operations in `batch` are done; they still have their names."""
    cdef const Op* last = e.batch[entry.items - 1]
    count_up(&e.counters.tensors, entry.items)
    if e.counters_page != NULL:
        count_completed(e, entry.items)
        if entry.meta.wire and entry.type == ENTRY_BATCH:
            count_compression(e, entry)
        if entry.earliest and not load32_relaxed(&last.flags) & OP_STAND_IN:
            counters_arrival(e.counters_page, arrival_since(e, entry, last), last.submitted, e.entry_begun)
            if entry.arrival and e.world.step_clock != NULL:
                clock_entry(e, entry, last)
    if observes_stages(e, entry) and not entry.meta.device:     # only the device knows the stages of those
        trace_entry(&e.trace, entry, e.batch, &e.executor, e.entry_begun, from_coordinator_time(&e.segment, entry.closed))
    if e.marks.ring != NULL:
        count_towards_mark(&e.marks, e.batch, entry.items)


cdef inline bint is_fusible(const engine_entry* entry) noexcept nogil:
    """Return whether the fusion threshold applies to an entry."""
    cdef const Operation* operation = operation_of(&entry.meta)
    return operation.reduces and not operation.alone


cdef void count_group_entry(State* e, const engine_entry* entry, uint64_t ns) noexcept nogil:
    """Count an entry of a group that moved data and took `ns`. There is a page of counters."""
    tally_group(e, e.counters_page.group_collectives, 1)
    tally_group(e, e.counters_page.group_bytes, entry.bytes)
    if not entry.meta.device:           # there this rank has only handed the work over
        tally_group(e, e.counters_page.group_ns, ns)


cdef void observe_entry_ends(State* e, const engine_entry* entry, uint64_t now) noexcept nogil:
    """Note that this rank has ended an entry of any type."""
    e.history[(e.rows - 1) % HISTORY].ended = now
    count_up(&e.counters.entries, 1)
    if e.network != NULL and e.counters_page != NULL:
        traffic_count(&e.traffic, e.network, e.counters_page)
    if entry.type == ENTRY_BATCH:
        count_up(&e.counters.nbytes, entry.bytes)
        count_up(&e.counters.busy_ns, now - e.entry_begun)
        if load32_relaxed(&e.trace.recording.on):
            trace_entry_ends(&e.trace, entry, now)
        if e.counters_page != NULL:
            counters_entry(e.counters_page, entry, is_fusible(entry), e.entry_begun, now, overlap_entry_ends(&e.overlap, now))
            count_group_entry(e, entry, age_ns(now, e.entry_begun))
    if e.marks.due:                     # written by the role's holder alone
        add_mark(e, SOURCE_TRAFFIC)


# ---- tensors on a GPU ---------------------------------------------------------------------------------------------------------

cdef void observe_device(State* e, int ordinal) noexcept nogil:
    """Note that the GPU is open, and count no work of an earlier world any more."""
    if e.counters_page != NULL:
        store_relaxed(e.counters_page.gpu, <uint64_t>ordinal + 1)
        # Work that an earlier world has left undone is never done.
        store_relaxed(e.counters_page.device_enqueued, load_relaxed(e.counters_page.device_entries))
        store_relaxed(e.counters_page.device_passed, load_relaxed(e.counters_page.device_entries))


cdef void observe_handover(State* e, const engine_entry* entry) noexcept nogil:
    """Count an entry that is handed over to the CUDA thread."""
    cdef State* world = e.world
    count_up(&e.counters.device_bytes, entry.bytes)
    pthread_mutex_lock(&world.lock)     # held because process sets hand over in other threads
    if world.counters_page != NULL:
        tally(world.counters_page.device_entries, 1)
        tally(world.counters_page.device_bytes, entry.bytes)
    pthread_mutex_unlock(&world.lock)


cdef void observe_enqueued(State* world) noexcept nogil:
    """Count an entry that the CUDA thread has enqueued."""
    if world.counters_page != NULL:
        tally(world.counters_page.device_enqueued, 1)


cdef void observe_passed(State* e, uint64_t entries) noexcept nogil:
    """Count entries that the GPU has done."""
    pthread_mutex_lock(&e.lock)
    if e.counters_page != NULL:
        tally(e.counters_page.device_passed, entries)
    pthread_mutex_unlock(&e.lock)


cdef void count_sample(counters_page* page, const device_sample* sample) noexcept nogil:
    """Add the stages that a sample has measured to the page."""
    cdef int stage
    for stage in range(STAGES):
        if sample.has >> stage & 1:
            tally(&page.device_ns[stage], sample.ns[stage])
            tally(&page.device_samples[stage], 1)
    if sample.ns[STAGE_NCCL]:
        tally(page.device_sampled_bytes, sample.bytes)


cdef void observe_sample(State* e, const device_sample* sample) noexcept nogil:
    """Count a sample and record it for the timeline."""
    pthread_mutex_lock(&e.lock)
    if e.counters_page != NULL:
        count_sample(e.counters_page, sample)
    if sample.n_slices:
        trace_sample(&e.trace, sample)
    pthread_mutex_unlock(&e.lock)


# ---- failures and stalls ----------------------------------------------------------------------------------------------------

cdef void observe_mismatch(State* e, bint completed) noexcept nogil:
    """Count an operation that has failed on every rank. `completed`: this rank had one, which has ended."""
    if e.counters_page != NULL:
        tally(e.counters_page.mismatches, 1)
        count_completed(e, completed)


cdef void observe_unfinished(State* e, const Op* op, int64_t sequence) noexcept nogil:
    """Remember an operation that is about to end without a result: alone, by the ERROR entry `sequence`, or with the world (-1).
    With the world, only the oldest half of the ring is kept, so that operations that failed alone remain in the other half."""
    cdef Unfinished* row
    if sequence < 0 and (e.table.inflight_count > UNFINISHED // 2 or fails(op)):    # the newest come first
        return
    row = &e.unfinished[e.unfinished_rows % UNFINISHED]
    memset(row, 0, sizeof(Unfinished))
    row.submitted, row.ended, row.sequence, row.begun, row.meta = op.submitted, now_ns(), sequence, op.begun, op.meta
    memcpy(row.name, op.record.name, min(op.record.name_bytes, <uint32_t>UNFINISHED_NAME - 1))
    e.unfinished_rows += 1


cdef void observe_failure(State* e, uint64_t word, uint64_t completed) noexcept nogil:
    """Note that the engine has failed, with `completed` operations. `word`: the abort word; 0: the engine was shut down."""
    if e.counters_page == NULL:
        return
    count_completed(e, completed)
    if word and e.world == e:
        store_relaxed(e.counters_page.culprit, word & 0xFFFF)
        store_relaxed(e.counters_page.cause, word >> 16 & 0xFFFF)
        store_relaxed(e.counters_page.state, COUNTED_RESETTING if e.another_follows else COUNTED_FAILED)
        store_relaxed(e.counters_page.stalled, 0)


cdef void observe_warning(State* e) noexcept nogil:
    """Count a stall report, which Python is about to log."""
    if e.counters_page != NULL:
        tally(e.counters_page.stall_warnings, 1)


cdef uint64_t observe_overdue(State* e, uint64_t operations, uint64_t seen) noexcept nogil:
    """Note how many operations of this process are overdue at the time `seen`. Return when to note it again; 2^64 - 1: when it
    has changed."""
    if e.counters_page == NULL:
        return <uint64_t>-1
    store_relaxed(e.counters_page.stalled, operations)
    return after_ns(seen, COUNT_AGAIN_NS) if operations else <uint64_t>-1


# ---- a step -----------------------------------------------------------------------------------------------------------------

cdef void add_mark(State* e, int source) noexcept nogil:
    """Add a mark for the tuner. The caller holds the lock."""
    add_step_mark(&e.marks, source, e.knobs.version, load_relaxed(&e.counters.wait_ns), load_relaxed(&e.counters.nbytes))


cdef void tell_step(State* e, int source) noexcept nogil:
    """Report the end of a step to the observers that are on."""
    pthread_mutex_lock(&e.lock)
    if load32_relaxed(&e.trace.recording.on):
        trace_step(&e.trace, now_ns())
    if e.counters_page != NULL:
        e.step_begun = counters_step(e.counters_page, e.step_begun)
    if e.marks.ring != NULL:            # set once, under the GIL
        add_mark(e, source)
    pthread_mutex_unlock(&e.lock)


cdef void judge_step(State* e, int optimizer) noexcept nogil:
    """Mark the end of a step by the clock of steps, and report it to the observers that are on if it was late."""
    cdef State* world = e.world
    cdef LateStep late
    cdef bint blind = False
    cdef bint is_late = step_clock_mark(world.step_clock, e, optimizer, &late, &blind)
    if not is_late and (world.counters_page == NULL or load_relaxed(world.counters_page.late_blind) == <uint64_t>blind):
        return
    pthread_mutex_lock(&world.lock)
    if world.counters_page != NULL:
        store_relaxed(world.counters_page.late_blind, blind)
    if is_late and world.counters_page != NULL:
        counters_late_step(world.counters_page, late.cause, late.excess)
    if is_late and load32_relaxed(&world.trace.recording.on):
        trace_late_step(&world.trace, &late)
    pthread_mutex_unlock(&world.lock)
