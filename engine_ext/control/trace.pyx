"""Recording for the timeline. While it is off, it costs its callers one branch; while it is on, a rate bounds how much is
recorded.

The coordinator decides which entries are recorded (lateness.pyx), so that all ranks record the same ones; totals count every
entry. A record is written when its entry is done, under the engine's lock. `head` and `tail` make the ring a queue between the
lock's holder and the one reader.
"""
from libc.stdint cimport int32_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset

from engine_ext.control.overlap cimport (
    Overlap, overlap_blocked, overlap_entry_begins, overlap_entry_ends, overlap_wait_begins, overlap_wait_ends,
)
from engine_ext.gpu.device cimport device_slice
from engine_ext.operations.op cimport Record
from engine_ext.platform.atomics cimport (
    load_acquire, load_relaxed, now_ns, store32_release, store_relaxed, store_release,
)
from engine_ext.platform.clock cimport age_ns
from engine_ext.platform.token_bucket cimport bucket_has
from engine_ext.shared.layout cimport ENTRY_BATCH

cdef enum:
    SHORTEST_WAIT = 10000       # nanoseconds: shorter waits are counted and not drawn


cdef int trace_start(Trace* t, uint64_t now, uint64_t rate, uint64_t saved) noexcept nogil:
    """Begin a recording, with a budget saved up over `saved` nanoseconds. The reader has read all of the last one. -1 without
    memory."""
    if t.ring == NULL:
        t.ring = <char*>malloc(TRACE_RING)
        if t.ring == NULL:
            return -1
    memset(&t.totals, 0, sizeof(Totals))
    memset(&t.overlap, 0, sizeof(Overlap))
    t.recordings += 1
    t.names_before, t.recording.since, t.step_begun = t.names, now, now
    t.recording.saved_since = age_ns(now, saved)
    t.spans.level, t.spans.filled = 0, t.recording.saved_since
    store_relaxed(&t.recording.rate, rate)
    store32_release(&t.recording.on, t.recordings)        # pairs with the coordinator's acquire: the fields that it reads are set
    return 0


cdef void trace_stop(Trace* t, uint64_t now) noexcept nogil:
    """End the recording: freeze its totals. The records stay for the reader."""
    t.totals, t.overlap.blocked = trace_totals(t, now), 0
    store32_release(&t.recording.on, 0)


cdef void trace_close(Trace* t) noexcept nogil:
    free(t.ring)
    t.ring = NULL


cdef char* reserve(Trace* t, uint64_t nbytes) noexcept nogil:
    """Return room for a record of `nbytes` at `head`; NULL, and counted as dropped, if the reader is behind."""
    cdef uint64_t place = t.head % TRACE_RING, left = TRACE_RING - t.head % TRACE_RING
    cdef uint64_t pad = left if left < nbytes else 0
    cdef RecordHead* head
    if t.head + pad + nbytes - load_acquire(&t.tail) > TRACE_RING:         # pairs with the reader's release: it has read them
        t.totals.dropped += 1
        return NULL
    if pad:
        head = <RecordHead*>(t.ring + place)    # records are multiples of 8 bytes: a head fits
        head.bytes, head.type = <uint32_t>pad, RecordType.RECORD_PAD
        store_release(&t.head, t.head + pad)
        place = 0
    return t.ring + place


cdef void publish(Trace* t, uint64_t nbytes) noexcept nogil:
    """Publish a record of `nbytes` that was written at `head`."""
    store_release(&t.head, t.head + nbytes)     # pairs with the reader's acquire: the record is whole


cdef uint32_t number_of(Trace* t, Record* record) noexcept nogil:
    """Return a name's number in this recording; the first time, write a NameRecord. 0: the ring has no room."""
    cdef uint64_t nbytes = (sizeof(NameRecord) + record.name_bytes + 7) & ~<uint64_t>7
    cdef NameRecord* out
    if record.traced > t.names_before:
        return record.traced
    out = <NameRecord*>reserve(t, nbytes)
    if out == NULL:
        return 0
    t.names += 1
    record.traced = t.names
    out.head.bytes, out.head.type = <uint32_t>nbytes, RecordType.RECORD_NAME
    out.number, out.name_bytes = record.traced, record.name_bytes
    memcpy(<char*>out + sizeof(NameRecord), record.name, record.name_bytes)
    publish(t, nbytes)
    return record.traced


cdef void trace_entry(Trace* t, const engine_entry* entry, Op** batch, const Executor* x, uint64_t started,
                      uint64_t closed) noexcept nogil:
    """Record an entry that is done. `closed`: when its batch was closed, 0: not known here. Its operations still have their
    names."""
    cdef uint64_t nbytes = sizeof(EntryRecord) + entry.items * sizeof(TensorRecord)
    cdef const uint64_t* arrivals = <const uint64_t*>entry + entry.words - entry.items
    cdef EntryRecord* out
    cdef TensorRecord* tensor
    cdef uint32_t i
    for i in range(entry.items):                # names come before the entry that mentions them
        if number_of(t, batch[i].record) == 0:
            return
    out = <EntryRecord*>reserve(t, nbytes)
    if out == NULL:
        return
    memset(out, 0, sizeof(EntryRecord))
    out.head.bytes, out.head.type = <uint32_t>nbytes, RecordType.RECORD_ENTRY
    out.sequence, out.nbytes, out.closed, out.started = entry.sequence, entry.bytes, closed if closed else started, started
    out.ended, out.items = now_ns(), entry.items
    out.type, out.kind, out.algorithm = entry.type, entry.kind, entry.algorithm
    if entry.type == ENTRY_BATCH:
        out.wire, out.dtype = entry.meta.wire, entry.meta.dtype
    if entry.type == ENTRY_BATCH and x.timed:   # else the executor's times are another entry's
        memcpy(out.first, x.stage_first, sizeof(out.first))
        memcpy(out.last, x.stage_last, sizeof(out.last))
        memcpy(out.spent, x.stage_spent, sizeof(out.spent))
    tensor = <TensorRecord*>(<char*>out + sizeof(EntryRecord))
    for i in range(entry.items):
        tensor[i].submitted, tensor[i].nbytes = batch[i].submitted, batch[i].nbytes
        tensor[i].arrival, tensor[i].name = arrivals[i], batch[i].record.traced
    publish(t, nbytes)


cdef void record_span(Trace* t, RecordType type, uint64_t begun, uint64_t ended) noexcept nogil:
    """Record a wait or a step, if the budget of lines allows it."""
    cdef SpanRecord* out
    if not bucket_has(&t.spans, load_relaxed(&t.recording.rate), ended):
        return
    out = <SpanRecord*>reserve(t, sizeof(SpanRecord))
    if out != NULL:
        t.spans.level -= 1
        out.head.bytes, out.head.type = <uint32_t>sizeof(SpanRecord), type
        out.begun, out.ended = begun, ended
        publish(t, sizeof(SpanRecord))


cdef void trace_sample(Trace* t, const device_sample* sample) noexcept nogil:
    """Record a sampled entry on a GPU, for which the host's clock knows some stages. The caller holds the lock."""
    cdef uint64_t slices = <uint64_t>sample.n_slices * sizeof(device_slice), nbytes = sizeof(SampleRecord) + slices
    cdef SampleRecord* out
    if not t.recording.on or not bucket_has(&t.spans, load_relaxed(&t.recording.rate), now_ns()):
        return
    out = <SampleRecord*>reserve(t, nbytes)
    if out == NULL:
        return
    t.spans.level -= <double>sample.n_slices
    out.head.bytes, out.head.type = <uint32_t>nbytes, RecordType.RECORD_SAMPLE
    out.sequence, out.nbytes, out.error_ns = sample.sequence, sample.bytes, sample.error_ns
    out.slices = <uint64_t>sample.n_slices
    memcpy(<char*>out + sizeof(SampleRecord), sample.slices, slices)
    publish(t, nbytes)


cdef void trace_step(Trace* t, uint64_t now) noexcept nogil:
    """Record the step that ends `now`."""
    t.totals.steps += 1
    record_span(t, RecordType.RECORD_STEP, t.step_begun, now)
    t.step_begun = now


cdef void trace_late_step(Trace* t, const LateStep* late) noexcept nogil:
    """Record why a step was late, if the budget of lines allows it."""
    cdef LateRecord* out
    if not bucket_has(&t.spans, load_relaxed(&t.recording.rate), late.ended):
        return
    out = <LateRecord*>reserve(t, sizeof(LateRecord))
    if out != NULL:
        t.spans.level -= 1
        out.head.bytes, out.head.type = <uint32_t>sizeof(LateRecord), RecordType.RECORD_LATE_STEP
        out.step = late[0]
        publish(t, sizeof(LateRecord))


cdef uint32_t trace_wait_begins(Trace* t, uint64_t now) noexcept nogil:
    """Note that a caller is blocked. Return the number of the recording that knows of it, or 0."""
    if t.recording.on:
        overlap_wait_begins(&t.overlap, max(now, t.recording.since))
    return t.recording.on


cdef void trace_wait_ends(Trace* t, uint32_t recording, uint64_t now) noexcept nogil:
    """Note that a caller's wait is over, and record it if it is the last of those that overlap."""
    if recording == t.recording.on and overlap_wait_ends(&t.overlap, now) >= SHORTEST_WAIT:   # else it began earlier
        record_span(t, RecordType.RECORD_WAIT, t.overlap.blocked_since, now)


cdef void trace_entry_begins(Trace* t, uint64_t now) noexcept nogil:
    overlap_entry_begins(&t.overlap, now)


cdef void trace_entry_ends(Trace* t, const engine_entry* entry, uint64_t now) noexcept nogil:
    """Count an entry that moved data, recorded or not."""
    t.totals.entries += 1
    t.totals.tensors += entry.items
    t.totals.nbytes += entry.bytes
    overlap_entry_ends(&t.overlap, now)


cdef Totals trace_totals(Trace* t, uint64_t now) noexcept nogil:
    """Return the totals, including a wait in progress."""
    cdef Totals totals = t.totals
    if t.recording.on:
        totals.blocked_ns, totals.busy_ns = overlap_blocked(&t.overlap, now), t.overlap.busy_ns
        totals.exposed_ns = t.overlap.exposed_ns
    return totals


# ---- marks of steps ---------------------------------------------------------------------------------------------------------

# Marks at the ends of steps. While nobody tunes, they cost one branch for an entry, and one for a pass of rank 0's driver.

cdef int open_step_marks(Marks* m) noexcept nogil:
    """Allocate the ring of step marks, from which the autotuner measures the length of steps; return -1 without memory."""
    if m.ring == NULL:
        m.ring = <Mark*>calloc(MARKS, sizeof(Mark))
    return 0 if m.ring != NULL else -1


cdef void close_step_marks(Marks* m) noexcept nogil:
    """Free the ring of step marks."""
    free(m.ring)
    m.ring = NULL


cdef void add_step_mark(Marks* m, int32_t source, uint32_t knob_version, uint64_t waited, uint64_t nbytes) noexcept nogil:
    """Add a mark: a step of `source` has ended. For SOURCE_TRAFFIC the caller also holds the driver's role."""
    cdef Mark* mark = &m.ring[m.count % MARKS]
    mark.time, mark.source, mark.knob_version, mark.waited, mark.nbytes = now_ns(), source, knob_version, waited, nbytes
    mark.busy = 0
    if source == SOURCE_TRAFFIC:
        mark.busy = m.busy + (age_ns(mark.time, m.since) if m.since else 0)
        m.due = False
    m.count += 1


cdef void count_towards_mark(Marks* m, Op** batch, uint32_t items) noexcept nogil:
    """Count operations that are about to be finished towards the next mark of the traffic."""
    cdef uint32_t k
    if m.anchor != NULL:
        for k in range(items):
            m.passed += batch[k].record == m.anchor
        if m.passed >= m.every:
            m.passed, m.due = 0, True
    elif m.window:
        m.passed += items
        if m.passed >= m.window:
            m.passed, m.due = 0, True


cdef void note_busy(Marks* m, bint busy) noexcept nogil:
    """Note whether any tensor is ready on all ranks and not done, from now on. The caller holds the driver's role."""
    if busy and m.since == 0:
        m.since = now_ns()
    elif not busy and m.since:
        m.busy += age_ns(now_ns(), m.since)
        m.since = 0
