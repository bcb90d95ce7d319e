"""Snapshots of an engine's state, and the knobs that Python sets.

A snapshot is copied under the engine's lock, and made into Python objects afterwards. Making them may run the garbage collector,
and objects that it frees take the lock too.
"""
from libc.stdint cimport int32_t, int64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset

from engine_ext.control.state cimport HISTORY, OVERDUE_BYTES, UNFINISHED, Row, Unfinished
from engine_ext.control.step_clock cimport (
    LATE_KEPT, PART_COMPUTE, PART_CPU, PART_GC, PART_INPUT, PART_WAIT, LateStep, StepClock, StepParts, StepRule, step_rule_judge,
)
from engine_ext.control.trace cimport MARKS, Mark
from engine_ext.operations.kinds cimport describe_meta, dtype_name, kind_name, op_name, operation_of
from engine_ext.operations.op cimport OP_TAKEN, Op, Record
from engine_ext.platform.atomics cimport load32_acquire, load32_relaxed, load_acquire, load_relaxed, now_ns, store32_release
from engine_ext.platform.clock cimport age_ns
from engine_ext.platform.posix cimport pthread_mutex_lock, pthread_mutex_t, pthread_mutex_unlock
from engine_ext.shared.counters cimport LATE_NAMES
from engine_ext.shared.layout cimport (
    ALGORITHM_NAMES, BETWEENS, BETWEEN_CARRIER, BETWEEN_NAMES, COORDINATOR, ENTRY_BATCH, ENTRY_NAMES, ENTRY_PAD,
    FAULT_CALL, FAULT_NONE, IDS, LAYOUT_SPARSE, MAX_DIMS, MAX_SOCKETS, NAME_BYTES, RING_WORDS, SLOT_BYTES, STORES, STORES_NAMES,
    WIRES, WIRE_NAMES, engine_entry, engine_meta, rank_page,
)
from engine_ext.shared.segment cimport ahead_ns, away, bit, clocked, visible

from engine_ext.errors import EngineError

cdef enum:
    DESCRIPTION_BYTES = 512     # bytes of the description of an operation


cdef struct Waiting:            # an operation in flight
    char[NAME_BYTES] name
    uint32_t name_bytes
    uint64_t submitted          # nanoseconds, monotonic
    bint begun                  # whether an entry with it has begun
    engine_meta meta
    int32_t id                  # -1: none, or its bits say nothing about this round


cdef struct Definition:         # a name with an id of the coordinator
    char[NAME_BYTES] name
    uint32_t name_bytes
    uint64_t times              # operations under it that have ended
    engine_meta meta


cdef dict counters_of(State* e):
    """Return the engine's counters by name."""
    return {"entries": load_relaxed(&e.counters.entries), "tensors": load_relaxed(&e.counters.tensors),
            "bytes": load_relaxed(&e.counters.nbytes), "wait_ns": load_relaxed(&e.counters.wait_ns),
            "busy_ns": load_relaxed(&e.counters.busy_ns),
            "device_bytes": load_relaxed(&e.counters.device_bytes), "wakes": load_relaxed(&e.segment.wakes),
            "sleeps": load_relaxed(&e.counters.sleeps), "yields": load_relaxed(&e.counters.yields),
            "late_wakes": load_relaxed(&e.counters.late)}


cdef object clock_of(const Segment* segment):
    """Return by how many nanoseconds rank 0's clock is ahead of this host's, and the error of that; None if unknown."""
    cdef uint64_t ahead = ahead_ns(segment)
    if not clocked(segment):
        return None
    return <int64_t>ahead, load_relaxed(&segment.header.ahead_error) if segment.far else 0


cdef tuple steps_of(State* e, uint64_t since):
    """Return the number of the first mark that is still kept, at least `since`, and a list with a tuple for each mark from there:
    time, knob version, source, waited, busy, bytes."""
    cdef Mark* marks = <Mark*>malloc(MARKS * sizeof(Mark))
    cdef Mark* mark
    cdef uint64_t k, end
    cdef list result = []
    if marks == NULL:
        raise MemoryError("no memory for the times of steps")
    try:
        pthread_mutex_lock(&e.lock)
        end = e.marks.count
        since = min(max(since, end - MARKS if end > MARKS else 0), end)
        for k in range(since, end):
            marks[k - since] = e.marks.ring[k % MARKS]
        pthread_mutex_unlock(&e.lock)
        for k in range(end - since):
            mark = &marks[k]
            result.append((mark.time, mark.knob_version, mark.source, mark.waited, mark.busy, mark.nbytes))
    finally:
        free(marks)
    return since, result


cdef void* copy_ring(pthread_mutex_t* lock, const void* ring, size_t row_bytes, uint64_t size, const uint64_t* written,
                     uint64_t* count) except NULL:
    """Copy a ring of rows under its lock, oldest first, into memory for the caller to free. `written`: how many rows were ever
    written; `count` receives how many are kept."""
    cdef char* rows = <char*>malloc(size * row_bytes)
    cdef uint64_t first, k
    if rows == NULL:
        raise MemoryError(f"no memory for a copy of {size * row_bytes} bytes")
    pthread_mutex_lock(lock)
    count[0] = min(written[0], size)
    first = written[0] - count[0]
    for k in range(count[0]):
        memcpy(rows + k * row_bytes, <const char*>ring + (first + k) % size * row_bytes, row_bytes)
    pthread_mutex_unlock(lock)
    return rows


cdef dict describe_late_step(const LateStep* late):
    """Return a late step as Python sees it; times in nanoseconds."""
    cdef const StepParts* parts = &late.parts
    return {"step": late.number, "begun": late.begun, "ended": late.ended, "late": late.excess,
            "cause": (<bytes>LATE_NAMES[late.cause]).decode(), "rank": late.rank if late.rank >= 0 else None,
            "input": parts.ns[PART_INPUT], "compute": parts.ns[PART_COMPUTE], "gc": parts.ns[PART_GC],
            "cpu": parts.ns[PART_CPU], "wait": parts.ns[PART_WAIT], "others_late": parts.late_ns}


cdef list late_steps_of(State* e):
    """Return the last late steps, oldest first; none where nothing is counted, and in a forked child."""
    cdef StepClock* clock = NULL
    cdef LateStep* steps
    cdef uint64_t k, count
    if e.alive != NULL and e.alive[0] == 1:
        clock = e.world.step_clock
    if clock == NULL:
        return []
    steps = <LateStep*>copy_ring(&clock.lock, clock.kept, sizeof(LateStep), LATE_KEPT, &clock.late, &count)
    try:
        return [describe_late_step(&steps[k]) for k in range(count)]
    finally:
        free(steps)


def judge_steps(list steps not None):
    """Judge steps one after the other by the rule of a rank; return a dict for each late one, else None. For tests.

    A step has times in nanoseconds, `input`, `compute`, `gc`, `cpu` and `wait`, and `others_late`, by how much `rank` was late;
    missing ones are 0, and no rank. `device`: whether there were tensors on a GPU; `elsewhere`: whether another thread was
    blocked in the engine; `far`: whether ranks on several hosts took part.
    """
    cdef StepRule* rule = <StepRule*>calloc(1, sizeof(StepRule))
    cdef LateStep late
    cdef list found = []
    if rule == NULL:
        raise MemoryError("no memory for a rule")
    try:
        for number, step in enumerate(steps, 1):
            memset(&late, 0, sizeof(late))
            late.number = number
            late.parts.ns[PART_INPUT], late.parts.ns[PART_COMPUTE] = step.get("input", 0), step.get("compute", 0)
            late.parts.ns[PART_GC], late.parts.ns[PART_CPU] = step.get("gc", 0), step.get("cpu", 0)
            late.parts.ns[PART_WAIT], late.parts.late_ns = step.get("wait", 0), step.get("others_late", 0)
            late.parts.late_rank, late.parts.device = step.get("rank", -1), step.get("device", False)
            late.parts.elsewhere, late.parts.far = step.get("elsewhere", False), step.get("far", False)
            found.append(describe_late_step(&late) if step_rule_judge(rule, &late.parts, &late) else None)
    finally:
        free(rule)
    return found


cdef list history_of(State* e):
    """Return the last schedule entries that this rank executed, oldest first."""
    cdef uint64_t k, count
    cdef Row* rows = <Row*>copy_ring(&e.lock, e.history, sizeof(Row), HISTORY, &e.rows, &count)
    cdef Row* row
    cdef list result = []
    try:
        for k in range(count):
            row = &rows[k]
            result.append({
                "entry": row.sequence, "type": ENTRY_NAMES[row.type].decode(),
                "kind": kind_name(row.kind).decode(),
                "algorithm": ALGORITHM_NAMES[row.algorithm].decode(), "stores": STORES_NAMES[row.stores].decode(),
                "tensors": row.items, "bytes": row.nbytes,
                "compression": WIRE_NAMES[row.wire].decode() if row.type == ENTRY_BATCH else None,
                "frozen": row.frozen, "knob_version": row.knob_version, "name": (<bytes>row.name).decode("utf-8", "replace"),
                "started": row.started / 1e9, "ended": row.ended / 1e9 if row.ended else None,
            })
    finally:
        free(rows)
    return result


cdef Definition* copy_definitions(State* e, uint64_t* count) noexcept nogil:
    """Copy all names that have an id, into memory for the caller to free; return NULL without memory."""
    cdef Definition* found
    cdef Record* record
    cdef int id
    count[0] = 0
    pthread_mutex_lock(&e.lock)
    found = <Definition*>malloc((e.table.names.count + 1) * sizeof(Definition))
    if found != NULL and e.table.by_id != NULL:
        for id in range(IDS):
            record = e.table.by_id[id]
            if record != NULL:
                memcpy(found[count[0]].name, record.name, record.name_bytes)
                found[count[0]].name_bytes, found[count[0]].times = record.name_bytes, record.times
                found[count[0]].meta = record.meta
                count[0] += 1
    pthread_mutex_unlock(&e.lock)
    return found


cdef list definitions_of(State* e):
    """Return the names that have an id as dicts: see `Engine.definitions`."""
    cdef uint64_t count, k
    cdef Definition* found = copy_definitions(e, &count)
    cdef engine_meta* meta
    cdef bint sparse, reduces
    cdef list result = []
    if found == NULL:
        raise MemoryError("no memory for the definitions")
    try:
        for k in range(count):
            meta = &found[k].meta
            sparse = meta.layout == LAYOUT_SPARSE
            reduces = sparse or operation_of(meta).reduces
            whole = meta.group and not sparse       # for a group: elements by dtype, and a digest of its shapes
            result.append({
                "name": found[k].name[:found[k].name_bytes].decode("utf-8", "replace"), "kind": kind_name(meta.kind).decode(),
                "op": op_name(meta.op).decode() if reduces else None, "dtype": dtype_name(meta.dtype).decode(),
                "tensors": 1 if sparse or not meta.group else meta.group, "sparse": sparse, "wire": meta.wire,
                "dims": tuple([meta.dims[d] for d in range(MAX_DIMS if whole else min(<int>meta.ndim, MAX_DIMS))]),
                "bytes": 0 if sparse else operation_of(meta).bytes(meta), "times": found[k].times,
            })
    finally:
        free(found)
    return result


cdef Waiting* copy_waiting(State* e, uint64_t* count) noexcept nogil:
    """Copy the operations in flight, newest first, into memory for the caller to free; NULL: there are none, or no memory."""
    cdef Waiting* found = NULL
    cdef Op* op
    cdef bint behind, taken
    pthread_mutex_lock(&e.lock)
    count[0] = 0
    if e.table.inflight_count:
        found = <Waiting*>malloc(e.table.inflight_count * sizeof(Waiting))
    if found != NULL:
        # While entries are left to execute, another rank's bit may already belong to the next round.
        behind = load_acquire(&e.segment.mine.cursor) != load_acquire(&e.segment.coordinator.tail)
        op = e.table.inflight
        while op != NULL:
            memcpy(found[count[0]].name, op.record.name, op.record.name_bytes)
            found[count[0]].name_bytes, found[count[0]].meta, found[count[0]].begun = op.record.name_bytes, op.meta, op.begun
            taken = load32_relaxed(&op.flags) & OP_TAKEN != 0       # likewise, and all ranks have submitted it
            found[count[0]].submitted, found[count[0]].id = op.submitted, -1 if behind or taken else op.record.id
            count[0] += 1
            op = op.next
    pthread_mutex_unlock(&e.lock)
    return found


cdef list pending_of(State* e):
    """Return the operations in flight, oldest first, as dicts: see `Engine.pending`."""
    cdef uint64_t now = now_ns(), count, k
    cdef Waiting* found
    cdef int r
    cdef bint unseen
    cdef list result = []
    if e.segment.header == NULL or e.alive[0] != 1:
        return result
    found = copy_waiting(e, &count)
    try:
        for k in range(count):
            missing, brought = None, []
            if found[k].id >= 0:
                missing, unseen = [], False
                for r in range(e.segment.size):
                    unseen |= not visible(&e.segment, r)
                    if visible(&e.segment, r) and not away(&e.segment, r):
                        same = bit(e.segment.pages[r].ready, found[k].id) == bit(e.segment.mine.ready, found[k].id)
                        (brought if same else missing).append(e.segment.numbers[r])
                if unseen and not missing:
                    missing = None          # if a rank is missing, it is on another host
            result.append({"name": found[k].name[:found[k].name_bytes].decode("utf-8", "replace"),
                           **make_description(&found[k].meta), "seconds": age_ns(now, found[k].submitted) / 1e9,
                           "begun": found[k].begun, "missing": missing, "brought": brought})
    finally:
        free(found)
    result.reverse()
    return result


cdef dict make_description(const engine_meta* meta):
    """Return what a rank submitted: kind, dtype, dims (none of a group), bytes (0: sparse, or of ranks' own numbers
    of rows), and all of it in words."""
    cdef char[DESCRIPTION_BYTES] text
    cdef engine_meta plain = meta[0]
    cdef int d, length
    if plain.fault == FAULT_CALL:       # the coordinator tells which call has failed, and why
        plain.fault = FAULT_NONE
    length = describe_meta(&plain, text, DESCRIPTION_BYTES)
    return {"kind": kind_name(meta.kind).decode(), "dtype": dtype_name(meta.dtype).decode(),
            "dims": [meta.dims[d] for d in range(0 if meta.group else min(<int>meta.ndim, MAX_DIMS))],
            "bytes": 0 if meta.layout == LAYOUT_SPARSE else max(0, operation_of(meta).bytes(meta)),
            "described": text[:length].decode("utf-8", "replace")}


cdef list unfinished_of(State* e):
    """Return this rank's last operations that ended without a result, in the order of their ends: see `Engine.unfinished`."""
    cdef uint64_t k, count
    cdef Unfinished* rows = <Unfinished*>copy_ring(
        &e.lock, e.unfinished, sizeof(Unfinished), UNFINISHED, &e.unfinished_rows, &count)
    cdef Unfinished* row
    cdef list result = []
    try:
        for k in range(count):
            row = &rows[k]
            result.append({"name": (<bytes>row.name).decode("utf-8", "replace"), **make_description(&row.meta),
                           "entry": row.sequence if row.sequence >= 0 else None, "begun": row.begun,
                           "failed_call": row.meta.fault == FAULT_CALL,
                           "submitted": row.submitted / 1e9, "ended": row.ended / 1e9})
    finally:
        free(rows)
    return result


cdef list overdue_of(State* e):
    """Return and clear the lines for a stall report."""
    cdef char[OVERDUE_BYTES] text
    pthread_mutex_lock(&e.lock)
    memcpy(text, e.overdue, OVERDUE_BYTES)
    e.overdue[0] = 0
    pthread_mutex_unlock(&e.lock)
    return (<bytes>text).decode("utf-8", "replace").splitlines()


cdef int64_t entry_at(State* e, const rank_page* page) noexcept nogil:
    """Return the number of the schedule entry that a rank executes, or executes next; -1: it has executed all.

    If the rank moves on during each of 100 looks, the number may be wrong.
    """
    cdef const engine_entry* entry
    cdef uint64_t cursor = load_acquire(&page.cursor), at, now
    cdef int64_t found = -1
    for _ in range(100):
        at, found = cursor, -1
        while found < 0 and at < load_acquire(&e.segment.coordinator.tail):
            entry = <const engine_entry*>&e.segment.schedule[at % RING_WORDS]
            if entry.type != ENTRY_PAD:
                found = <int64_t>entry.sequence
            at += max(entry.words, <unsigned int>1)
        now = load_acquire(&page.cursor)
        if now == cursor:           # the rank has not passed these words, so they were not overwritten
            return found
        cursor = now
    return found


cdef list ranks_of(State* e):
    """Return the progress of every rank as dicts: see `Engine.ranks`."""
    cdef rank_page* page
    cdef int64_t entry
    cdef list result = []
    cdef int r
    if e.segment.header == NULL or e.alive[0] != 1:
        return result
    for r in range(e.segment.size):
        page = e.segment.pages[r]
        entry = entry_at(e, page)
        result.append({"rank": e.segment.numbers[r], "entry": entry if entry >= 0 else None, "packed": load_acquire(&page.packed),
                       "reduced": load_acquire(&page.reduced), "copied": load_acquire(&page.copied),
                       "left": load32_acquire(&page.left) != 0})
    return result


# ---- knobs ------------------------------------------------------------------------------------------------------------------

# Knobs as Python passes and gets them: a dict by name. `engine_knobs` (layout.h) has a member for each name.
#
# `engine.config` refuses values out of range before, with an error for the user; a test compares the two.

# For each knob its smallest and largest value, or the words for its numbers.
KNOBS = {
    "fusion_threshold": (0, 1 << 60),
    "cycle_time_ms": (0.0, 10_000.0),
    "stores": tuple([STORES_NAMES[number].decode() for number in range(STORES)]),
    "chunk_bytes": (4096, SLOT_BYTES),
    "between_hosts": tuple([BETWEEN_NAMES[number].decode() for number in range(BETWEENS)]),
    "compression": tuple([WIRE_NAMES[number].decode() for number in range(WIRES)]),
    "sockets_per_lane": (1, MAX_SOCKETS),
}


cdef str describe_allowed(tuple allowed):
    """Return the values that a knob with these limits may have, for an error."""
    kind = "a whole number" if isinstance(allowed[0], int) else "a number"
    return f"{kind} from {allowed[0]} to {allowed[1]}"


cdef engine_knobs knobs_with(engine_knobs knobs, dict changes) except *:
    """Return `knobs` with changes applied. Raise ValueError or TypeError for impossible ones."""
    cdef dict values = knobs
    for name, value in changes.items():
        if name not in KNOBS:
            raise TypeError(f"there is no knob {name!r}; there are: {', '.join(KNOBS)}")
        allowed = KNOBS[name]
        if isinstance(allowed[0], str):
            if value not in allowed:
                raise ValueError(f"{name} is one of {', '.join(allowed)}, not {value!r}")
            values[name] = allowed.index(value)
        else:
            if isinstance(value, bool) or not isinstance(value, int if isinstance(allowed[0], int) else (int, float)):
                raise TypeError(f"{name} is {describe_allowed(allowed)}, not a {type(value).__name__}")
            if not allowed[0] <= value <= allowed[1]:       # also false for NaN
                raise ValueError(f"{name} is {describe_allowed(allowed)}, not {value!r}")
            values[name] = type(allowed[0])(value)
    return values


cdef int expect_summing(const State* e, const engine_knobs* knobs) except -1:
    """Raise EngineError if a carrier has to sum, and none can."""
    if (knobs.between_hosts == BETWEEN_CARRIER and e.segment.world == &e.segment and e.segment.hosts > 1
            and not e.segment.crews.summing):
        raise EngineError("between_hosts=mpi has the carrier of the lanes sum, and there is none that can: set lanes=mpi "
                          "(ENGINE_LANES=mpi) on all ranks, too, or another value of between_hosts")
    return 0


cdef uint32_t set_knobs(State* e, dict changes) except? 0:
    """Make the coordinator use changed knobs from the next step on; return their version."""
    cdef engine_knobs before, chosen
    cdef bint current = False
    if e.segment.rank != COORDINATOR:
        raise EngineError(f"knobs are set on the coordinator, rank 0; this is rank {e.segment.rank}")
    while not current:
        pthread_mutex_lock(&e.lock)
        before = e.wanted
        pthread_mutex_unlock(&e.lock)
        chosen = knobs_with(before, changes)    # without the lock: it runs Python code, and may raise
        expect_summing(e, &chosen)
        chosen.version = before.version + 1
        pthread_mutex_lock(&e.lock)
        current = e.wanted.version == before.version    # False: another thread has set knobs meanwhile, which are kept
        if current:
            e.wanted = chosen
            store32_release(&e.wanted_new, 1)
        pthread_mutex_unlock(&e.lock)
    return chosen.version


cdef dict read_knobs_in_force(State* e):
    """Return the knobs of the last entry that this rank executed, their version, and the entry with which it took effect."""
    cdef engine_knobs seen
    cdef uint64_t entry
    cdef dict values
    pthread_mutex_lock(&e.lock)
    seen, entry = e.knobs, e.knobs_entry
    pthread_mutex_unlock(&e.lock)
    values = seen
    result = {"version": seen.version, "entry": entry}
    for name, allowed in KNOBS.items():
        result[name] = allowed[values[name]] if isinstance(allowed[0], str) else values[name]
    return result
