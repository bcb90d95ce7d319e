"""Read the schedule in order, execute its entries, and complete operations. The caller holds the driver's role."""
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcmp, memcpy

from engine_ext.control.completion cimport complete_op, raise_event, wake_waiters
from engine_ext.control.device_entries cimport give_to_cuda_thread, stop_device
from engine_ext.control.native_calls cimport backlog_take
from engine_ext.control.observers cimport (
    observe_completions, observe_entry_begins, observe_entry_ends, observe_entry_looks, observe_entry_waits, observe_failure,
    observe_mismatch, observe_submission, observe_unfinished, observes_stages,
)
from engine_ext.control.size_exchange cimport members_receive, members_send, sizes_receive, sizes_send, exchanges_sizes
from engine_ext.control.state cimport EVENT_ABORT
from engine_ext.control.table cimport (
    table_define, table_evict, table_finish, table_record, table_release, table_stand_in, table_toggle,
)
from engine_ext.control.turns cimport turns_give
from engine_ext.coordinator.names cimport names_find
from engine_ext.coordinator.stores cimport stores_measured
from engine_ext.data.executor cimport executor_progress
from engine_ext.operations.kinds cimport operation_of
from engine_ext.operations.op cimport OP_STAND_IN, OP_TAKEN, Op, Record, fails
from engine_ext.operations.operation cimport (
    SAYS_ROWS, WRONG_ROW_COUNTS, Operation, bytes_of_row, has_one_dtype, is_coded_whole, operation_begin,
)
from engine_ext.platform.atomics cimport (
    add32, load32_relaxed, load_acquire, now_ns, store32_release, store_relaxed, store_release,
)
from engine_ext.platform.clock cimport age_ns
from engine_ext.platform.posix cimport pthread_mutex_lock, pthread_mutex_unlock
from engine_ext.shared.layout cimport (
    ALGORITHM_BLOCKS, ALGORITHM_CARRIER, ALGORITHM_TWO_SHOT, CAUSE_RAISED, COORDINATOR, ENTRY_ALIGN, ENTRY_BATCH, ENTRY_DEFINE,
    ENTRY_ERROR, ENTRY_EVICT, ENTRY_JOINED, ENTRY_MEMBERS, ENTRY_SKIP, ENTRY_TURN, FAULT_CALL, LAYOUT_SPARSE, SLEEP_FULL,
    WIRE_FP8, WIRE_TUNED, WIRE_TUNED8, Status, engine_entry, engine_meta, entry_ids, entry_rows,
)
from engine_ext.shared.segment cimport abort_world, coordinates, place_of, ring_both, schedule_advance, schedule_next, wake
from engine_ext.transport.arena cimport arena_privatise


cdef void fail_everything(State* e) noexcept nogil:
    """Complete all operations in flight as failed, because this engine's world has failed or is left. Nothing is shared in the
    arena any more."""
    cdef Op* op
    cdef State* part
    cdef uint64_t failed = 0, word = load_acquire(e.segment.abort)
    e.executor.active, e.entry = False, NULL
    arena_privatise(&e.arena)
    pthread_mutex_lock(&e.lock)
    store32_release(&e.failed, 1)       # under the lock: no submission comes after this loop; the CUDA thread completes no more
    while e.table.inflight != NULL or e.table.failures != NULL:
        op = e.table.inflight if e.table.inflight != NULL else e.table.failures
        failed += not fails(op) and not load32_relaxed(&op.flags) & OP_TAKEN       # a taken one was counted as it was handed over
        observe_unfinished(e, op, -1)
        table_finish(&e.table, op, Status.FAILED_WORLD)
        complete_op(e, op)
    while e.backlog != NULL:
        complete_op(e, backlog_take(e))
    part = e.sets
    while part != NULL:                 # for threads that sleep in a process set of this rank
        ring_both(&part.segment, part.segment.rank)
        part = part.next_set
    e.unallocated = e.allocating = NULL  # the thread that makes room touches no operation any more
    pthread_mutex_unlock(&e.lock)
    if word:
        stop_device(e)
    observe_failure(e, word, failed)
    wake_waiters(e)
    raise_event(e, EVENT_ABORT)


cdef bint collect_batch(State* e, const engine_entry* entry) noexcept nogil:
    """Collect this rank's operations for an entry's members in `batch`. Return False if one is missing: for want of memory, or by
    a defect of the engine. The caller holds the lock."""
    cdef const int32_t* ids = entry_ids(entry)
    cdef Record* record
    cdef Op** batch
    cdef int32_t i
    cdef bint whole = True
    if <int32_t>entry.items > e.batch_room:
        batch = <Op**>realloc(e.batch, entry.items * sizeof(Op*))
        if batch == NULL:
            return False
        e.batch, e.batch_room = batch, <int32_t>entry.items
    for i in range(<int32_t>entry.items):
        record = e.table.by_id[ids[i]]
        if record != NULL and record.inflight == NULL and e.joined and table_stand_in(&e.table, record):
            observe_submission(e, record.inflight)
        if record == NULL or record.inflight == NULL:
            whole = False
            break
        e.batch[i] = record.inflight
        record.inflight.begun = True
    return whole


cdef inline bint needs_exchange(const State* e, const engine_entry* entry) noexcept nogil:
    """Return whether ranks exchange sizes or members before an entry of tensors on a GPU is handed over."""
    return entry.flags & ENTRY_MEMBERS != 0 or exchanges_sizes(e, entry)


cdef bint begin_batch(State* e, engine_entry* entry) noexcept nogil:
    """Start a BATCH whose operations are in `batch`. False without memory."""
    e.sending_members = entry.flags & ENTRY_MEMBERS != 0
    if e.sending_members:
        return members_send(e, entry)
    return sizes_send(e, entry) if entry.meta.device else plan_batch(e, entry)


cdef bint continue_batch(State* e, const engine_entry* entry) noexcept nogil:
    """Continue a BATCH after its exchange: start its operation, or hand it over to the CUDA thread. False without memory, or if a
    rank sent sizes that cannot be."""
    if e.sending_members and not members_receive(e, entry):
        return False
    if entry.meta.device and not e.sending_members and not sizes_receive(e, entry):
        return False
    e.sending_members = False
    e.executor.begun = now_ns()
    return give_to_cuda_thread(e, entry) if entry.meta.device else plan_batch(e, entry)


cdef bint plan_batch(State* e, const engine_entry* entry) noexcept nogil:
    """Start the operation of a BATCH whose members are in `batch`. False without memory."""
    return operation_begin(operation_of(&entry.meta), &e.executor, e.batch, entry, place_of(&e.segment, entry.meta.root),
                           observes_stages(e, entry))


cdef const char* end_batch(State* e, const engine_entry* entry) noexcept nogil:
    """Hand over the results, when the executor is done. Return NULL, or why that is not possible."""
    cdef const Operation* operation = operation_of(&entry.meta)
    return operation.finish(&e.executor, e.batch) if operation.finish != NULL else NULL


cdef void finish_batch(State* e, const engine_entry* entry, int status) noexcept nogil:
    """Complete every operation in `batch` with `status`."""
    cdef int32_t i
    pthread_mutex_lock(&e.lock)
    observe_completions(e, entry)
    for i in range(<int32_t>entry.items):
        if entry.flags & ENTRY_ALIGN:
            e.batch[i].meta.dims = entry.meta.dims      # read by the thread that waits for the barrier
        table_finish(&e.table, e.batch[i], status)
    pthread_mutex_unlock(&e.lock)
    for i in range(<int32_t>entry.items):
        complete_op(e, e.batch[i])
    wake_waiters(e)


cdef void end_world(State* e, const char* reason) noexcept nogil:
    """End the world for an entry that cannot go on: for want of memory here (`reason`), or for wrong numbers of the rank at
    fault."""
    cdef int culprit = e.executor.culprit
    e.executor.culprit = -1
    if culprit >= 0:
        abort_world(&e.segment, culprit, CAUSE_RAISED, WRONG_ROW_COUNTS)
    else:
        abort_world(&e.segment, e.segment.rank, CAUSE_RAISED, reason)


cdef void report_mismatch(State* e, const engine_entry* entry) noexcept nogil:
    """Execute an ERROR entry: its operation fails on every rank, and nothing else does."""
    cdef const char* body = <const char*>entry + sizeof(engine_entry)
    cdef Record* record
    cdef Op* op = NULL
    cdef bint counts = False
    pthread_mutex_lock(&e.lock)
    record = table_record(&e.table, body, <unsigned int>entry.name_bytes)
    if record != NULL:
        op = record.inflight
    if op != NULL:
        counts = not fails(op)
        observe_unfinished(e, op, <int64_t>entry.sequence)
        free(op.text)
        op.text = <char*>malloc(entry.bytes + 1)
        if op.text != NULL:
            memcpy(op.text, body + entry.name_bytes, entry.bytes)
            op.text[entry.bytes] = 0
        if entry.meta.fault == FAULT_CALL:
            op.meta.root = entry.meta.root
        table_finish(&e.table, op, Status.FAILED_CALL if entry.meta.fault == FAULT_CALL else Status.MISMATCH)
    elif e.joined and entry.id >= 0:
        table_toggle(&e.table, entry.id)            # the bit then stands as if this rank had submitted the operation
    elif record != NULL:
        table_release(&e.table, record)             # made above, by a rank that has joined
    pthread_mutex_unlock(&e.lock)
    observe_mismatch(e, counts)
    if op != NULL:
        complete_op(e, op)
        wake_waiters(e)


cdef void end_join(State* e, const engine_entry* entry) noexcept nogil:
    """Execute a JOINED entry: every rank has joined, and all go on together."""
    pthread_mutex_lock(&e.lock)
    e.joined, e.last_joined = False, entry.id
    store_release(&e.segment.mine.joined, 0)        # before the cursor passes the entry: pairs with the coordinator's resume
    add32(&e.segment.joins, 1)                      # pairs with is_goal_met()
    pthread_mutex_unlock(&e.lock)
    wake_waiters(e)


cdef void note_knobs(State* e, const engine_entry* entry) noexcept nogil:
    """Note the knobs in force, as stamped on an entry. The caller holds the lock."""
    if entry.knobs.version != e.knobs.version:
        e.knobs_entry = entry.sequence
    e.knobs = entry.knobs
    store_relaxed(&e.fusion_threshold, entry.knobs.fusion_threshold)
    if e.network != NULL:
        e.network.lanes.sockets = entry.knobs.sockets_per_lane


cdef void leave_entry(State* e, engine_entry* entry) noexcept nogil:
    """Move the rank's cursor past an entry that is done, and note its end."""
    cdef uint64_t now
    pthread_mutex_lock(&e.lock)
    now = e.entry_ended = now_ns()
    observe_entry_ends(e, entry, now)
    pthread_mutex_unlock(&e.lock)
    if coordinates(&e.segment) and entry.type == ENTRY_BATCH and entry.algorithm == ALGORITHM_TWO_SHOT:
        # Between hosts an entry may wait mostly for the network, which stores do not affect: there its own work counts.
        stores_measured(&e.coordinator.choosers[entry.meta.wire != 0], entry.bytes, entry.stores,
                        age_ns(now - e.entry_begun, e.traffic.waited))
    e.entry = NULL
    schedule_advance(&e.segment, entry)


cdef bint execute_entry(State* e, engine_entry* entry, bint collected) noexcept nogil:
    """Execute `entry`, or start it. `collected`: its operations are in `batch`. Return False if the cursor cannot pass it yet."""
    cdef int status = Status.OK
    if entry.type == ENTRY_BATCH:
        if collected and entry.meta.device and not e.opened:
            abort_world(&e.segment, e.segment.rank, CAUSE_RAISED, b"an entry of tensors on GPUs came, and its GPU is not open")
            return False
        if entry.meta.device and not needs_exchange(e, entry):
            if collected and give_to_cuda_thread(e, entry):
                return True
            collected = False
        if not (collected and begin_batch(e, entry)):
            end_world(e, b"out of memory for a result, or an operation is missing")
        return False
    if entry.type == ENTRY_SKIP:
        if collected:
            finish_batch(e, entry, Status.ABSENT)
    elif entry.type == ENTRY_ERROR:
        report_mismatch(e, entry)
    elif entry.type == ENTRY_JOINED:
        end_join(e, entry)
    elif entry.type == ENTRY_TURN:
        turns_give(e, entry)
    elif entry.type == ENTRY_DEFINE or entry.type == ENTRY_EVICT:
        pthread_mutex_lock(&e.lock)
        if entry.type == ENTRY_DEFINE:
            if not table_define(&e.table, entry.id, <const char*>entry + sizeof(engine_entry), <unsigned int>entry.name_bytes,
                                &entry.meta):
                status = Status.NO_MEMORY
        else:
            status = table_evict(&e.table, entry.id)
        pthread_mutex_unlock(&e.lock)
        if status == Status.NO_MEMORY:
            end_world(e, b"out of memory for a name, or the coordinator gave an id twice")
        if entry.type == ENTRY_EVICT:
            wake(&e.segment, e.segment.leader, 0)      # an evicted operation in flight was sent as a request
    return status == Status.OK


cdef bint run_schedule(State* e) noexcept nogil:
    """Execute all that can be executed now. Return whether anything was."""
    cdef bint moved = False, collected
    cdef engine_entry* entry
    cdef const char* failure
    while True:
        if e.entry != NULL:
            observe_entry_looks(e)
            moved |= executor_progress(&e.executor)
            if e.executor.active:
                if e.executor.waits:
                    observe_entry_waits(e)
                return moved
            entry = e.entry
            if e.sending_members or entry.meta.device:
                moved = True
                if not continue_batch(e, entry):
                    end_world(e, b"out of memory for a group of tensors, or its result")
                    return moved
                if entry.meta.device:
                    leave_entry(e, entry)
                continue
            failure = end_batch(e, entry)
            if failure != NULL:
                end_world(e, failure)
                return moved
            finish_batch(e, entry, Status.OK)
            leave_entry(e, entry)
        else:
            entry = schedule_next(&e.segment)
            if entry == NULL:
                break
            pthread_mutex_lock(&e.lock)
            e.entry_begun = e.executor.begun = now_ns()
            observe_entry_begins(e, entry)
            note_knobs(e, entry)
            collected = (entry.type == ENTRY_BATCH or entry.type == ENTRY_SKIP) and collect_batch(e, entry)
            pthread_mutex_unlock(&e.lock)
            if e.segment.far and not entry_fits(e, entry, collected):
                abort_world(&e.segment, COORDINATOR, CAUSE_RAISED,
                            b"its schedule has an entry that does not go with what this rank has submitted")
                return True
            if execute_entry(e, entry, collected):
                leave_entry(e, entry)
            elif e.executor.active:
                e.entry = entry
            else:
                return moved            # an eviction without room for its request, or a failure: the next look tries again
        moved = True
    if moved and not coordinates(&e.segment):
        wake(&e.segment, e.segment.leader, SLEEP_FULL)    # the coordinator may wait for cursors
    return moved


# ---- an entry beside what this rank has submitted ------------------------------------------------------------------------------

cdef inline bint may_travel_as(const engine_meta* meta, int wire) noexcept nogil:
    """Return whether an operation with this metadata may travel in an entry with `wire`."""
    return meta.wire == wire or meta.wire == WIRE_TUNED8 or (meta.wire == WIRE_TUNED and wire != WIRE_FP8)


cdef bint matches_entry(const State* e, const engine_entry* entry, const Op* op) noexcept nogil:
    """Return whether an operation of this rank is what the entry says. An operation without a tensor counts as its name's
    definition: another rank may know that the tensor is sparse."""
    cdef const Operation* operation = operation_of(&entry.meta)
    cdef bint absent = op.source == NULL and op.nbytes > 0
    cdef engine_meta meta = op.record.meta if absent else op.meta
    cdef uint64_t nbytes
    if load32_relaxed(&op.flags) & OP_TAKEN or (absent and meta.kind != op.meta.kind and meta.layout != LAYOUT_SPARSE):
        return False
    if meta.kind != entry.meta.kind or meta.op != entry.meta.op:
        return False
    if entry.flags & ENTRY_MEMBERS and meta.group and entry.id == e.segment.rank and op.members == NULL:
        return False
    if entry.type == ENTRY_SKIP or not operation.moves:
        return True
    if (meta.dtype != entry.meta.dtype or meta.device != entry.meta.device or meta.root != entry.meta.root
            or meta.prescale != entry.meta.prescale or meta.postscale != entry.meta.postscale
            or not may_travel_as(&meta, entry.meta.wire)):
        return False
    if (entry.algorithm == ALGORITHM_BLOCKS and not is_coded_whole(&meta)) or (
            entry.algorithm == ALGORITHM_CARRIER and not has_one_dtype(&meta)):
        return False
    if absent and meta.layout != LAYOUT_SPARSE and (meta.ndim != op.meta.ndim or meta.group != op.meta.group
                                                    or memcmp(meta.dims, op.meta.dims, sizeof(meta.dims)) != 0):
        return False
    if not operation.alone:
        return True
    meta.shared, meta.wire = entry.meta.shared, entry.meta.wire
    if memcmp(&meta, &entry.meta, sizeof(engine_meta)) != 0:
        return False
    if operation.says == SAYS_ROWS:
        nbytes = <uint64_t>entry_rows(entry)[e.segment.rank] * <uint64_t>bytes_of_row(&entry.meta)
        return nbytes == (0 if absent or load32_relaxed(&op.flags) & OP_STAND_IN else op.nbytes)
    return True


cdef bint entry_fits(State* e, const engine_entry* entry, bint collected) noexcept nogil:
    """Return whether an entry from another host goes with what this rank has submitted, so that it can be executed. `collected`:
    its operations are in `batch`."""
    cdef Record* record
    cdef bint known = True
    cdef uint32_t i
    if entry.type == ENTRY_BATCH or entry.type == ENTRY_SKIP:
        if not collected:
            return e.joined             # memory was missing
        for i in range(entry.items):
            if not matches_entry(e, entry, e.batch[i]):
                return False
        return True
    if entry.type == ENTRY_JOINED:
        return e.joined
    if entry.type == ENTRY_DEFINE or entry.type == ENTRY_ERROR:
        pthread_mutex_lock(&e.lock)
        record = <Record*>names_find(&e.table.names, <const char*>entry + sizeof(engine_entry), <uint32_t>entry.name_bytes)
        if entry.type == ENTRY_DEFINE:
            known = (record == NULL or record.id < 0 or record.id == entry.id) and (
                e.table.by_id[entry.id] == NULL or e.table.by_id[entry.id] == record)
        elif record != NULL and record.inflight != NULL:
            known = not load32_relaxed(&record.inflight.flags) & OP_TAKEN
        pthread_mutex_unlock(&e.lock)
    return known
