"""Submission of an operation: under its name or the next of the unnamed, when there is room for it."""
from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport uint64_t
from libc.string cimport memset

from engine_ext.bindings.arguments cimport expect_name
from engine_ext.bindings.refusals cimport refuse
from engine_ext.control.driver cimport (
    Goal, Target, driver_call, driver_note_thread, driver_pin, driver_submit, driver_unpin, driver_wait,
)
from engine_ext.control.stall cimport stall_look_after
from engine_ext.control.state cimport State
from engine_ext.operations.kinds cimport kind_name
from engine_ext.operations.op cimport OP_DONE, Op, Record
from engine_ext.platform.atomics cimport load_acquire, now_ns
from engine_ext.platform.clock cimport overdue_ns, patience_at, patience_look
from engine_ext.shared.layout cimport COORDINATOR, Status
from engine_ext.shared.segment cimport gone

from engine_ext.errors import DuplicateNameError


cdef str submit(State* e, Op* op, object name, bint blocking):
    """Bring an operation under `name`, or the next of the unnamed; what it is called. With `blocking`, wait up to a tick for it.

    If this raises, nothing was submitted, and `op` is its maker's to free.
    """
    cdef Target target
    memset(&target, 0, sizeof(Target))
    driver_note_thread(e)
    if name is not None:
        target.text = expect_name(name, &target.text_bytes)
    bring(e, &target, op, blocking, name)
    return target.label[:target.text_bytes].decode() if name is None else name


cdef int bring(State* e, Target* target, Op* op, bint blocking, object name) except -1:
    """Hand an operation over to the engine, when there is room for it."""
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
            refuse(e, status, kind_name(op.meta.kind).decode() if name is None else name)


cdef int make_room(State* e, const Target* target, int status) except -1:
    """Flow control: wait until the coordinator has read requests, or what is in flight under a name is done."""
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
                expect_heard(e, goal.record, begun)
    finally:
        if goal.record != NULL and target.record == NULL:
            driver_unpin(e, goal.record)


cdef int expect_heard(State* e, const Record* record, uint64_t begun) except -1:
    """The ranks have yet to hear of a failed call. No operation is overdue meanwhile: this rank's own wait has a limit."""
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
    """A wait has lasted a tick: signals, stall limit, ranks that left. NULL: whichever has waited longest."""
    PyErr_CheckSignals()
    with nogil:
        stall_look_after(e, op)
    return 0
