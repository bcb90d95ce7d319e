"""Submission of an operation: under its name or the next of the unnamed, when there is room for it."""
from cpython.exc cimport PyErr_CheckSignals
from cpython.pythread cimport PyThread_get_thread_ident
from libc.stdint cimport uint32_t, uint64_t
from libc.stdio cimport snprintf
from libc.string cimport memset

from engine_ext.bindings.arguments cimport expect_name
from engine_ext.bindings.refusals cimport refuse
from engine_ext.control.driver cimport Goal, Target, driver_call, driver_pin, driver_submit, driver_unpin, driver_wait
from engine_ext.control.stall cimport stall_look_after
from engine_ext.control.state cimport State
from engine_ext.operations.kinds cimport kind_name
from engine_ext.operations.op cimport OP_DONE, Op, Record
from engine_ext.platform.atomics cimport load32_acquire, load_acquire, now_ns, store_relaxed, store_release
from engine_ext.platform.clock cimport overdue_ns, patience_at, patience_look
from engine_ext.shared.layout cimport COORDINATOR, UNNAMED, Status

from engine_ext.errors import DuplicateNameError


cdef str submit(State* e, Op* op, object name, bint blocking):
    """Bring an operation under `name`, or the next of the unnamed; what it is called. With `blocking`, wait up to a tick for it.

    If this raises, nothing was submitted, and `op` is its maker's to free.
    """
    cdef char[64] buffer
    cdef Target target
    cdef unsigned long long number
    cdef int kind = op.meta.kind
    cdef str label
    memset(&target, 0, sizeof(Target))
    note_thread(e)
    if name is not None:
        target.text = expect_name(name, &target.text_bytes)
        bring(e, &target, op, blocking, name)
        return name
    # The number is taken before the GIL is released, or two threads would take the same one.
    number = e.unnamed[kind]
    count_unnamed(e, kind, number + 1)
    op.number = number + 1
    target.text = buffer
    target.text_bytes = <uint32_t>snprintf(buffer, 64, "%s.noname.%llu", kind_name(kind), number % UNNAMED)
    label = buffer[:target.text_bytes].decode()
    try:
        bring(e, &target, op, blocking, label)
    except BaseException:
        if e.unnamed[kind] == number + 1:       # nothing was submitted, and no other thread has gone on from there
            count_unnamed(e, kind, number)
        raise
    return label


cdef int bring(State* e, const Target* target, Op* op, bint blocking, str label) except -1:
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
            refuse(e, status, label)


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
        goal.record = target.record if target.record != NULL else driver_pin(e, target.text, target.text_bytes)
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
    cdef bint left = e.segment.rank != COORDINATOR and load32_acquire(&e.segment.pages[COORDINATOR].left)
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


cdef void count_unnamed(State* e, int kind, uint64_t count) noexcept:
    """Before the operation is submitted: who sees that, or `stuck`, sees the number too."""
    e.unnamed[kind] = count
    store_relaxed(&e.segment.mine.unnamed[kind], count)


cdef void note_thread(State* e) noexcept:
    """Note whether one thread alone has used this engine: only then does its wait mean that nothing more comes from here."""
    cdef unsigned long thread = <unsigned long>PyThread_get_thread_ident()
    if e.caller == 0:
        e.caller = thread
    if e.caller != thread and not e.many_threads:
        e.many_threads = True
        store_release(&e.segment.mine.stuck, 0)    # said by the first thread, of a rank with no other
