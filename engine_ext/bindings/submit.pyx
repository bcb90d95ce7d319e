"""Submission of operations under given or generated names once there is room, and announcement of failed calls."""
from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport malloc
from libc.string cimport memcpy, memset

from engine_ext.bindings.collectives cimport expect_name
from engine_ext.bindings.memory cimport abandon_op
from engine_ext.bindings.refusals cimport raise_refusal
from engine_ext.control.driver cimport (
    Goal, driver_call, driver_submit_and_drive, driver_note_thread, driver_pin, driver_submit, driver_unpin, driver_wait,
)
from engine_ext.control.stall cimport stall_look_after, stall_look_for_left
from engine_ext.coordinator.fusion cimport MOST_LEFT_OUT, TOO_MANY_UNNAMED
from engine_ext.operations.kinds cimport kind_name
from engine_ext.operations.op cimport OP_DONE, OP_IN_TURN, OP_PATIENT, Record
from engine_ext.operations.operation cimport free_op, new_op
from engine_ext.platform.atomics cimport load32_relaxed, load_acquire, load_relaxed, now_ns
from engine_ext.platform.clock cimport overdue_ns, patience_at, patience_look
from engine_ext.platform.posix cimport pthread_mutex_lock, pthread_mutex_unlock
from engine_ext.shared.layout cimport (
    CAUSE_RAISED, COORDINATOR, FAILURE_BYTES, FAULT_CALL, KINDS, KIND_BARRIER, NAME_BYTES, UNNAMED, UNNAMED_SHIFT, Status,
)
from engine_ext.shared.segment cimport abort_world, bit, gone, visible

import logging

from engine_ext.caller import place
from engine_ext.errors import DuplicateNameError, EngineError

cdef str submit(State* e, Op* op, object name, bint blocking):
    """Submit an operation under `name`, or unnamed if it is None; return its name. With `blocking`, wait up to a tick for it.

    If this raises, nothing was submitted, and the caller still owns `op`.
    """
    cdef Target target
    memset(&target, 0, sizeof(Target))
    driver_note_thread(e)
    if name is not None:
        target.text = expect_name(name, &target.text_bytes)
    submit_when_room(e, &target, op, blocking, name)
    return target.label[:target.text_bytes].decode() if name is None else name


cdef int submit_in_turn(State* e, Op* op, str name) except -1:
    """Submit an operation under a name that may be in flight; it runs after earlier ones of that name. This never waits.

    If this raises, nothing was submitted, and the caller still owns `op`.
    """
    cdef Target target
    cdef int status
    memset(&target, 0, sizeof(Target))
    driver_note_thread(e)
    target.text = expect_name(name, &target.text_bytes)
    op.awaited, op.flags = True, OP_PATIENT | OP_IN_TURN       # awaited even if no thread waits: it must not cost a cycle
    with nogil:
        status = driver_submit_and_drive(e, &target, op)
        if status == Status.OK:
            stall_look_for_left(e)
    if status != Status.OK:
        op.flags = OP_DONE
        raise_refusal(e, status, name)
    return 0


cdef int submit_when_room(State* e, Target* target, Op* op, bint blocking, object name) except -1:
    """Submit an operation, waiting while there is no room for it. `blocking`: also wait up to a tick for its end."""
    cdef int status
    while True:
        op.flags = 0
        with nogil:
            status = driver_call(e, target, op, TICK_NS) if blocking else driver_submit(e, target, op)
        if status == Status.OK or status == Status.TICK:
            return 0
        op.flags = OP_DONE
        if status == Status.NO_ROOM or status == Status.AFTER_FAILURE or (status == Status.DUPLICATE and op.number):
            make_room(e, target, status)
        else:
            raise_refusal(e, status, kind_name(op.meta.kind).decode() if name is None else name)


cdef int make_room(State* e, const Target* target, int status) except -1:
    """Wait until a refused submission may be tried again; `status` says why it was refused.

    NO_ROOM: until the coordinator has read this rank's requests. Otherwise: until what is in flight under the name is done.
    """
    cdef Goal goal
    cdef int waited
    cdef uint64_t begun = patience_at(e.clock, now_ns())
    memset(&goal, 0, sizeof(Goal))
    if status == Status.NO_ROOM:
        goal.drained = load_acquire(&e.segment.coordinator.drained[e.segment.rank])
        if goal.drained == load_acquire(&e.segment.mine.request_head):
            return 0            # read in the meantime: there is nothing to wait for
    else:
        goal.record = target.record
        if goal.record == NULL:
            goal.record = driver_pin(e, target.text if target.text != NULL else target.label, target.text_bytes)
        if goal.record == NULL:
            raise MemoryError("no memory for a name")
    try:
        while True:
            with nogil:
                waited = driver_wait(e, &goal, TICK_NS)
            if waited == Status.OK:
                return 0
            between_ticks(e, NULL)
            if status == Status.AFTER_FAILURE:
                raise_overdue_failure(e, goal.record, begun)
    finally:
        if goal.record != NULL and target.record == NULL:
            driver_unpin(e, goal.record)


cdef int raise_overdue_failure(State* e, const Record* record, uint64_t begun) except -1:
    """Raise if the other ranks have not seen a failed call within the stall limit, or if the coordinator has left.

    This checks once; the caller waits between two checks.
    """
    # Pairs with the release in close.
    cdef bint left = e.segment.rank != COORDINATOR and gone(&e.segment, COORDINATOR)
    if left or overdue_ns(patience_look(e.clock), begun, e.stall_limit_ns):
        raise DuplicateNameError(
            f"a call of '{record.name[:record.name_bytes].decode('utf-8', 'replace')}' has failed on rank "
            f"{e.segment.numbers[e.segment.rank]}, and other ranks have not called it since: it cannot be called again before "
            "they have"
        )
    return 0


cdef int between_ticks(State* e, Op* op) except -1:
    """Do the work between two ticks of a wait: signals, stall limit, ranks that left. `op` NULL: for the longest-waiting one."""
    PyErr_CheckSignals()
    with nogil:
        stall_look_after(e, op)
    return 0


# ---- failed calls -----------------------------------------------------------------------------------------------------------

# Failed calls that a rank announces: calls that raised before submission, and unnamed operations that it has left out.
#
# So every rank learns of them, and the numbers of unnamed operations stay in step (docs/architecture/protocol-failure.md).

LOGGER = logging.getLogger("engine")
KIND_NUMBERS = {kind_name(number).decode(): number for number in range(KINDS)}


cdef int fail_call(State* e, str kind, object name, str reason) except -1:
    """Announce that a call of this rank has failed, in place of the operation that it would have submitted."""
    first_line = reason.partition("\n")[0]
    submit_failure(e, KIND_NUMBERS[kind], name, f"failed at {place()}: {first_line}", False)
    return 0


cdef int submit_failure(State* e, int kind, object name, str text, bint waits) except -1:
    """Submit the announcement of a failed call; return whether it was submitted.

    `waits`: this rank waits for ranks that have submitted the operation, and they wait for this rank.
    """
    cdef bytes encoded = text.encode("utf-8", "replace")[:FAILURE_BYTES]
    cdef Op* op = new_op()
    op.meta.kind, op.meta.fault, op.meta.root = <unsigned char>kind, FAULT_CALL, waits
    op.text = <char*>malloc(len(encoded) + 1)
    if op.text == NULL:
        free_op(op)
        raise MemoryError("no memory to tell of a failed call")
    memcpy(op.text, <const char*>encoded, len(encoded) + 1)
    try:
        submit(e, op, name, False)
    except (EngineError, TypeError, ValueError):
        return 0        # the operation could not be submitted either: no world, a rank that has joined, or an invalid name
    finally:
        abandon_op(e, op)
    return 1


cdef int catch_up(State* e, const int64_t* counts) except -1:
    """Submit failures, after a barrier, for the unnamed operations that other ranks submitted before it and this one did not."""
    cdef int kind
    for kind in range(KINDS):
        if kind != KIND_BARRIER and load_relaxed(&e.unnamed[kind]) < <uint64_t>counts[kind]:
            submit_skipped(e, kind, <uint64_t>counts[kind], "came to a barrier without it", False, COORDINATOR)
    return 0


cdef int submit_skipped(State* e, int kind, uint64_t count, str why, bint waits, int reporter) except -1:
    """Submit failures for unnamed operations that this rank left out, until it has submitted `count` of that kind.

    If more are missing than can be submitted, the world fails, with the rank `reporter` of that number as the culprit.
    """
    cdef str where
    if count > load_relaxed(&e.unnamed[kind]) + MOST_LEFT_OUT:
        abort_world(&e.segment, reporter, CAUSE_RAISED, TOO_MANY_UNNAMED)
        return 0
    where = place()
    LOGGER.warning(
        "rank %d has submitted %d unnamed operations of kind %s, other ranks %d: it %s, at %s. What it has left out fails on "
        "every rank", e.segment.numbers[e.segment.rank], load_relaxed(&e.unnamed[kind]), kind_name(kind).decode(),
        count, why, where)
    while load_relaxed(&e.unnamed[kind]) < count and submit_failure(e, kind, None, f"{why}, at {where}", waits):
        pass            # else this rank is gone, or another of its threads has joined
    return 0


cdef int release_stuck(State* e, Op* op) except -1:
    """Release ranks that form a deadlock with this one, whose only thread has waited for `op` for longer than a tick.

    Such a rank has a single thread that waits for an unnamed operation which this rank has not submitted, and has itself not
    submitted `op`. Each would wait for the other forever. So this rank announces that it left that operation out, and the other
    rank does the same. A barrier is exempt, because there the ranks are to come together.
    """
    cdef int r
    for r in range(e.segment.size if not load32_relaxed(&e.many_threads) else 0):
        if r != e.segment.rank and load_acquire(&e.segment.pages[r].waits_unnamed) and is_known_to_lack(e, r, op):
            release(e, r, op)
    return 0


cdef int release(State* e, int rank, Op* op) except -1:
    """Release a rank that waits for an unnamed operation which this one has left out. This rank waits for `op`, or did so until
    that rank made the same announcement."""
    cdef uint64_t waits = load_acquire(&e.segment.pages[rank].waits_unnamed)
    cdef uint64_t number = waits & ((<uint64_t>1 << UNNAMED_SHIFT) - 1)
    cdef int kind = <int>(waits >> UNNAMED_SHIFT) - 1
    if waits and not load32_relaxed(&e.many_threads) and kind != KIND_BARRIER and load_relaxed(&e.unnamed[kind]) <= number:
        submit_skipped(e, kind, number + 1,
                       f"waits for {name_of(e, op)}, which rank {e.segment.numbers[rank]} has not submitted", True, rank)
    return 0


cdef bint is_known_to_lack(State* e, int rank, Op* op) noexcept:
    """Return whether another rank is known not to have submitted an operation that this rank has. For a new name only rank 0
    knows."""
    cdef bint missing = False
    if op.number:
        return load_acquire(&e.segment.pages[rank].unnamed[op.meta.kind]) < op.number
    pthread_mutex_lock(&e.lock)
    # The bits of a rank on another host are up to date while its only thread waits (hosts/relay.pyx).
    if op.record != NULL and op.record.id >= 0 and (
            visible(&e.segment, rank) or load_acquire(&e.segment.pages[rank].waits_unnamed)):
        missing = bit(e.segment.pages[rank].ready, op.record.id) != bit(e.segment.mine.ready, op.record.id)
    pthread_mutex_unlock(&e.lock)
    return missing


cdef str name_of(State* e, Op* op):
    """Return the quoted name of an operation for an error, also when it is unnamed or finished."""
    cdef char[NAME_BYTES] name
    cdef uint32_t length = 0
    if op.number:
        return f"'{kind_name(op.meta.kind).decode()}.noname.{(op.number - 1) % UNNAMED}'"
    pthread_mutex_lock(&e.lock)
    if op.record != NULL:           # else it is finished
        length = op.record.name_bytes
        memcpy(name, op.record.name, length)
    pthread_mutex_unlock(&e.lock)
    return f"'{name[:length].decode('utf-8', 'replace')}'"
