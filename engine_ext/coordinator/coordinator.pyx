"""The coordinator. It reads readiness and requests, closes batches and appends entries; it never waits and never fails.

The holder of rank 0's driver role calls it; its state needs no lock. When the schedule is full it appends nothing and sets
`append_again`; readiness stays where it is, in the bits and in the names with open requests.
"""
from libc.stdio cimport snprintf
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcmp, memcpy, memset

from engine_ext.coordinator.frozen cimport frozen_close, frozen_deadline, frozen_dissolve, frozen_free, frozen_hold
from engine_ext.coordinator.fusion cimport close_batches
from engine_ext.coordinator.lateness cimport observe_batch_opens, observe_found, observe_ready
from engine_ext.coordinator.mismatch cimport MISMATCH_BYTES, absent, describe_mismatch, first_present, sent_by
from engine_ext.coordinator.names cimport names_open
from engine_ext.coordinator.requests cimport (
    eviction_begin, eviction_end, requests_clear, requests_close, requests_drain, requests_forget, requests_wait, turns_append,
    turns_close,
)
from engine_ext.operations.kinds cimport describe_ranks, fit, wire_bytes
from engine_ext.operations.operation cimport SAYS_ALIGNED, SAYS_ROWS, Operation
from engine_ext.platform.atomics cimport load32_relaxed, load_acquire, load_relaxed, store_relaxed
from engine_ext.platform.clock cimport after_ns, overdue_ns
from engine_ext.shared.layout cimport (
    CAUSE_RAISED, COORDINATOR, ENTRY_DEFINE, ENTRY_ERROR, ENTRY_JOINED, FAULT_CALL, FAULT_NONE, IDS, ID_WORDS, MAX_RANKS,
    Status, add_bytes,
)
from engine_ext.shared.segment cimport (
    abort_world, flip_bit, prefer_absentee, schedule_append, schedule_reserve, schedule_slowest, set_bit,
)

cdef extern from "platform/cpu.h" nogil:
    void engine_prefetch_read(const void* memory, size_t nbytes)

cdef enum:
    LINE = 64                   # bytes of a cache line


cdef int coordinator_open(Coordinator* c, Segment* segment, const patience* clock, const engine_knobs* knobs) noexcept nogil:
    """Initialize a coordinator; OK or NO_MEMORY. The caller closes it in both cases."""
    cdef int32_t i
    memset(c, 0, sizeof(Coordinator))
    c.segment = c.writer.segment = segment
    c.clock = clock
    c.knobs = knobs[0]
    c.by_id = <NameState**>calloc(IDS, sizeof(NameState*))
    c.free_ids = <int32_t*>malloc(IDS * sizeof(int32_t))
    c.phase = <uint64_t*>calloc(ID_WORDS, 8)
    c.queued = <uint64_t*>calloc(ID_WORDS, 8)
    c.defined = <uint64_t*>calloc(ID_WORDS, 8)
    c.queue = <int32_t*>malloc(IDS * sizeof(int32_t))
    c.scratch = <int32_t*>malloc(IDS * sizeof(int32_t))
    c.scanned = <uint64_t*>calloc(segment.size, 8)
    c.request_tail = <uint64_t*>calloc(segment.size, 8)
    c.joined = <bint*>calloc(segment.size, sizeof(bint))
    if (not names_open(&c.names) or c.by_id == NULL or c.free_ids == NULL or c.phase == NULL or c.queued == NULL
            or c.defined == NULL or c.queue == NULL or c.scratch == NULL or c.scanned == NULL or c.request_tail == NULL
            or c.joined == NULL):
        return Status.NO_MEMORY
    for i in range(IDS):
        c.free_ids[i] = IDS - 1 - i         # the lowest id comes first: few words to scan
    c.free_count = IDS
    return Status.OK


cdef void coordinator_close(Coordinator* c) noexcept nogil:
    frozen_free(c)
    turns_close(c)
    requests_close(c)
    free(c.by_id)
    free(c.free_ids)
    free(c.phase)
    free(c.queued)
    free(c.defined)
    free(c.queue)
    free(c.scratch)
    free(c.scanned)
    free(c.request_tail)
    free(c.joined)
    memset(c, 0, sizeof(Coordinator))


cdef bint append_error(Coordinator* c, NameState* name, const char* text, int text_bytes) noexcept nogil:
    """Append an ERROR: an operation cannot be done because ranks disagree, or because a rank's call has failed. False: the
    schedule is full."""
    cdef uint32_t words = <uint32_t>(sizeof(engine_entry) + name.name_bytes + text_bytes + 7) // 8
    cdef engine_entry* entry = schedule_reserve(&c.writer, words)
    cdef char* body
    cdef int r
    if entry == NULL:
        return False
    entry.type, entry.id = ENTRY_ERROR, name.id
    entry.meta.fault = FAULT_CALL if name.failures else FAULT_NONE
    for r in range(c.segment.size):
        if entry.meta.root == 0 and name.requests[r] != NULL and name.requests[r].text != NULL and name.requests[r].meta.root:
            entry.meta.root = r + 1     # it waits for ranks that wait for this operation
    entry.name_bytes, entry.bytes = <int32_t>name.name_bytes, <uint64_t>text_bytes
    body = <char*>entry + sizeof(engine_entry)
    memcpy(body, name.name, name.name_bytes)
    memcpy(body + name.name_bytes, text, text_bytes)
    stamp(c, entry)
    schedule_append(&c.writer, entry)
    return True


cdef bint append_definition(Coordinator* c, NameState* name, const engine_meta* meta, int32_t id) noexcept nogil:
    """Append a DEFINE for a name. False: the schedule is full."""
    cdef uint32_t words = <uint32_t>(sizeof(engine_entry) + name.name_bytes + 7) // 8
    cdef engine_entry* entry = schedule_reserve(&c.writer, words)
    if entry == NULL:
        return False
    entry.type, entry.id, entry.meta = ENTRY_DEFINE, id, meta[0]
    entry.name_bytes = <int32_t>name.name_bytes
    memcpy(<char*>entry + sizeof(engine_entry), name.name, name.name_bytes)
    stamp(c, entry)
    schedule_append(&c.writer, entry)
    return True


cdef bint resolve_requests(Coordinator* c, NameState* name) noexcept nogil:
    """Define and queue a name that every rank has submitted, at least one by a request; or append an ERROR if they disagree.

    False: try again later.
    """
    cdef char[MISMATCH_BYTES] text
    cdef engine_meta meta = first_present(c, name)[0]
    cdef int length = describe_mismatch(c, name, &meta, text)
    cdef int32_t id = name.id
    cdef bint first = id < 0
    cdef int r
    if length:
        if not append_error(c, name, text, length):
            return False
        requests_clear(c, name)
        if id >= 0:
            flip_bit(c.phase, id)
        else:
            requests_forget(c, name)
        return True
    for r in range(c.segment.size):
        if not c.joined[r] and sent_by(name, r).shared != meta.shared:
            meta.shared = -1            # not in the arena everywhere, or not at one place: it counts as private
            break
    if id < 0:
        if c.free_count == 0:
            return False                # coordinator_step evicts
        id = c.free_ids[c.free_count - 1]
    if name.id < 0 or memcmp(&meta, &name.meta, sizeof(engine_meta)) != 0:
        if not append_definition(c, name, &meta, id):
            return False
        frozen_dissolve(c, name)
        if (meta.wire == WIRE_TUNED or meta.wire == WIRE_TUNED8) and operation_of(&meta).reduces:
            store_relaxed(&c.tuned, c.tuned + 1)        # the tuner reads it
            if meta.wire == WIRE_TUNED8 and can_be_coded(&meta) and c.segment.hosts > 1:
                store_relaxed(&c.tuned_coded, c.tuned_coded + 1)
    if first:
        c.free_count -= 1
        c.by_id[id] = name
        set_bit(c.defined, id)
        c.words = max(c.words, (id >> 6) + 1)
        # No rank has toggled a bit for it. Appending flips the phase of every member, so the phase starts one flip away.
        flip_bit(c.phase, id)
    name.id, name.meta = id, meta
    if not enqueue(c, name, first):
        return False
    requests_clear(c, name)
    return True


cdef inline int64_t load_rows(Coordinator* c, const NameState* name, int rank, bint first) noexcept nogil:
    """Return the number that `rank` submitted with `name`: from its request the `first` time, later from its page."""
    return name.requests[rank].rows if first else <int64_t>load_relaxed(&c.segment.pages[rank].rows[name.id])


cdef bint count_rows(Coordinator* c, NameState* name, bint first) noexcept nogil:
    """Store the rows of each rank, and their bytes in `nbytes`. False without memory, or if a rank reports an impossible number,
    which ends the world."""
    cdef uint64_t nbytes = 0
    cdef int r
    if name.rows == NULL:
        name.rows = <int64_t*>calloc(c.segment.size, sizeof(int64_t))
        if name.rows == NULL:
            return False
    for r in range(c.segment.size):
        name.rows[r] = 0 if absent(c, name, r) else load_rows(c, name, r, first)
        if not add_bytes(&nbytes, name.rows[r], name.nbytes):
            abort_world(c.segment, r, CAUSE_RAISED, b"it has reported a number of rows that no tensor can have")
            return False
    name.nbytes = nbytes
    return True


cdef bint enqueue(Coordinator* c, NameState* name, bint first) noexcept nogil:
    """Put a name that every rank has submitted into the open batch or its frozen batch, with the values that vary per call.

    The `first` time these come from the requests, since no rank knew the id; later from the ranks' pages.
    """
    cdef const Operation* operation = operation_of(&name.meta)
    cdef int r
    name.nbytes, name.absent, name.aligns = <uint64_t>wire_bytes(&name.meta, wire_now(c, &name.meta)), 0, False
    if operation.says == SAYS_ROWS:
        if not count_rows(c, name, first):
            return False
    elif operation.says == SAYS_ALIGNED:
        name.aligns = c.joined_count == 0
        for r in range(c.segment.size if name.aligns else 0):
            name.aligns &= load_rows(c, name, r, first) != 0
    if operation.optional or name.meta.device:      # on GPUs a rank that has joined needs memory for what it receives
        for r in range(c.segment.size):
            name.absent += absent(c, name, r)
    if waiting(c) == 0:
        observe_batch_opens(c, time_of_step(c))
    observe_ready(c, name, first)
    set_bit(c.queued, name.id)
    if not frozen_hold(c, name):
        open_queue(c, name)
    return True


cdef void open_queue(Coordinator* c, NameState* name) noexcept nogil:
    """Append a name to the open batch. It is ready on all ranks, and marked so in `queued`."""
    if c.queue_count == 0:
        c.queue_since = time_of_step(c)
    c.queue[c.queue_count] = name.id
    c.queue_count += 1
    c.queue_bytes += name.nbytes


cdef bint find_ready(Coordinator* c) noexcept nogil:
    """Queue every defined name whose bit was toggled by all ranks that have not joined. Return whether there was any."""
    cdef uint64_t[ID_WORDS] fresh
    cdef uint64_t ready, any_fresh = 0
    cdef int32_t w, id
    cdef int r
    cdef bint alike
    cdef NameState* name
    for w in range(c.words):
        ready = c.defined[w] & ~c.queued[w] if c.joined_count < c.segment.size else 0
        for r in range(c.segment.size):
            if ready == 0:
                break
            if c.joined[r]:
                continue            # its bits follow the entries, and tell nothing
            ready &= load_acquire(&c.segment.pages[r].ready[w]) ^ c.phase[w]     # pairs with announce_op(): rows, absent, data
        fresh[w] = ready
        any_fresh |= ready
    # A request with changed metadata is on its ring before its bit is set, so the rings are read after the bits.
    for r in range(c.segment.size):
        if requests_wait(c, r):
            requests_drain(c, r)
    if any_fresh == 0:
        return False
    for w in range(c.words):
        ready = fresh[w]
        while ready:
            id = w * 64 + count_trailing_zeros(ready)
            ready &= ready - 1
            name = c.by_id[id]
            observe_found(c, id)
            alike = name.brought == 0 and (c.joined_count == 0 or not operation_of(&name.meta).rooted)
            if not (enqueue(c, name, False) if alike else resolve_requests(c, name)):
                c.append_again = True
    return True

cdef extern from * nogil:
    """
    #define count_trailing_zeros(x) __builtin_ctzll(x)
    """
    int count_trailing_zeros(uint64_t x)


cdef bint coordinator_unseen(Coordinator* c) noexcept nogil:
    """Return whether some rank has submitted, or begun to wait, since the last step."""
    cdef int r
    for r in range(c.segment.size):
        if load_acquire(&c.segment.pages[r].arrivals) + load_acquire(&c.segment.pages[r].waits) != load_relaxed(&c.scanned[r]):
            return True
    return False


cdef inline bint brought_by_all(const Coordinator* c, const NameState* name) noexcept nogil:
    """Return whether every rank that has not joined has requested a name. A rank whose call has failed may have joined since."""
    cdef int r
    if name.brought + c.joined_count < c.segment.size:
        return False
    for r in range(c.segment.size):
        if name.requests[r] == NULL and not c.joined[r]:
            return False
    return True


cdef void see_joined(Coordinator* c) noexcept nogil:
    """Note which ranks have joined. All submissions of a rank before its join are visible after this, and done."""
    cdef uint64_t latest = 0, since
    cdef bint joined
    cdef int r
    c.joined_count = 0
    for r in range(c.segment.size):
        joined = load_acquire(&c.segment.pages[r].joined) != 0             # pairs with driver_join
        if joined and not c.joined[r]:
            since = load_relaxed(&c.segment.pages[r].joined_at)     # compared only among ranks that are seen together
            if since >= latest:
                c.last_joined, latest = r, since
        c.joined[r] = joined
        c.joined_count += joined


cdef bint append_joined(Coordinator* c) noexcept nogil:
    """Append a JOINED, as all ranks have joined, and read no submissions until all ranks have passed it. False: the schedule is
    full."""
    cdef engine_entry* entry = schedule_reserve(&c.writer, sizeof(engine_entry) // 8)
    if entry == NULL:
        return False
    entry.type, entry.id = ENTRY_JOINED, c.segment.numbers[c.last_joined]
    stamp(c, entry)
    schedule_append(&c.writer, entry)
    c.resume_at = c.writer.tail
    return True


cdef void coordinator_set_knobs(Coordinator* c, const engine_knobs* knobs) noexcept nogil:
    """Put knobs into force. Queued tensors will travel by them, so their bytes are counted anew."""
    cdef NameState* name
    cdef int32_t i
    c.knobs, c.queue_bytes = knobs[0], 0
    for i in range(c.queue_count):
        name = c.by_id[c.queue[i]]
        if operation_of(&name.meta).reduces:
            name.nbytes = <uint64_t>wire_bytes(&name.meta, wire_now(c, &name.meta))
        c.queue_bytes += name.nbytes


cdef bint coordinator_step(Coordinator* c) noexcept nogil:
    """Do all that can be done now, without waiting. Return whether anything was appended."""
    cdef Segment* segment = c.segment
    cdef uint64_t tail = c.writer.tail, seen, steps
    cdef bint changed = c.append_again
    cdef NameState* name
    cdef NameState* after
    cdef int r, wanting = 0
    c.now = 0
    if c.resume_at:
        if schedule_slowest(&c.writer) < c.resume_at:
            c.append_again = True              # a cursor that passes wakes it
            return False
        c.resume_at, changed = 0, True
    for r in range(segment.size):
        seen = load_acquire(&segment.pages[r].arrivals) + load_acquire(&segment.pages[r].waits)     # pairs with announce_op()
        if seen != c.scanned[r]:
            store_relaxed(&c.scanned[r], seen)             # coordinator_unseen reads it without the role
            changed = True
            engine_prefetch_read(segment.pages[r].ready, LINE)      # its latest writes, in the usual case of few names
            engine_prefetch_read(segment.pages[r].awaited, LINE)
    steps = load_acquire(&segment.pages[COORDINATOR].steps)
    if steps != c.step:
        c.step, c.usual_items, c.step_items = steps, c.step_items, 0
    if changed:
        c.append_again = False
        see_joined(c)
        if c.evicting_count:
            eviction_end(c)
        find_ready(c)
        name = c.open
        while name != NULL:
            after = name.next
            # When all have joined, only failures are left; ranks must get them before they go on.
            if ((name.id < 0 or c.joined_count == segment.size) and brought_by_all(c, name)) and not resolve_requests(c, name):
                c.append_again = True
                wanting += c.free_count == 0
            name = after
        if wanting:
            eviction_begin(c, wanting)
    if c.turns_wanted and not turns_append(c):
        c.append_again = True
    if c.held and not frozen_close(c, changed):
        c.append_again = True
    if c.queue_count and not close_batches(c):
        c.append_again = True
    # Not before the last failure is appended: after a join the numbers of unnamed operations have another meaning.
    if (c.joined_count == segment.size and waiting(c) == 0 and c.open == NULL and not c.resume_at
            and not append_joined(c)):
        c.append_again = True
    return c.writer.tail != tail


cdef uint64_t coordinator_deadline(Coordinator* c) noexcept nogil:
    """Return when the open batch has to be closed, or frozen ones looked at: nanoseconds, monotonic; 0: neither."""
    cdef uint64_t when = after_ns(c.queue_since, cycle_ns(c)) if c.queue_count else 0
    cdef uint64_t look = frozen_deadline(c)
    return look if when == 0 or (look and look < when) else when


cdef uint64_t coordinator_look_at(const Coordinator* c, uint64_t warning_ns, uint64_t limit_ns) noexcept nogil:
    """Return when the first name that some rank has not submitted becomes overdue, as this process sees time pass; 0: never. A
    warning or limit of 0 means never."""
    cdef const NameState* name = c.open
    cdef uint64_t when = <uint64_t>-1
    while name != NULL:
        if warning_ns and not name.reported and wanted(name):
            when = min(when, after_ns(name.since, warning_ns))
        if limit_ns and wanted(name):
            when = min(when, after_ns(name.since, limit_ns))
        name = name.next
    return when if when != <uint64_t>-1 else 0


cdef int coordinator_absentee(Coordinator* c, uint64_t seen, uint64_t limit_ns, char* text, int room) noexcept nogil:
    """Return a rank that has not requested a name that another requested `limit_ns` before `seen`; -1: none. `text`: what it
    lacks.

    The request that has waited longest counts: a rank that lacks a later one may itself wait for that one. With a limit of 0 only
    ranks that have left count.
    """
    cdef bint[MAX_RANKS] missing
    cdef NameState* name = c.open
    cdef uint64_t longest = <uint64_t>-1
    cdef int r, first, at, culprit = -1
    while name != NULL:
        first = -1
        if wanted(name) and name.since < longest:
            for r in range(c.segment.size):
                missing[r] = withheld(c, name, r) and (
                    overdue_ns(seen, name.since, limit_ns) or load32_relaxed(&c.segment.pages[r].left))
                if missing[r]:
                    first = prefer_absentee(c.segment, first, r)
        if first >= 0:
            culprit, longest = first, name.since
            at = fit(0, snprintf(text, room, "'%.*s' was not submitted by ", <int>name.name_bytes, name.name), room)
            describe_ranks(missing, c.segment.numbers, c.segment.size, text + at, room - at)
        name = name.next
    return culprit
