"""Handle: one submitted operation, as Python holds it, and waiting for it; and calls that wait without a handle."""
cimport cython
from cpython.exc cimport PyErr_CheckSignals
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport uint32_t
from libc.string cimport memset

from engine_ext.bindings.collectives cimport barrier_op, direct_allreduce_op, expect_name
from engine_ext.bindings.devices cimport has_passed, list_group_parts, make_stream_wait
from engine_ext.bindings.groups cimport group_parts
from engine_ext.bindings.memory cimport Memory, abandon_op, copy_memory, keep_alive, free_when_passed, take_memory
from engine_ext.bindings.refusals cimport expect_open, make_mismatch_error, raise_refusal
from engine_ext.bindings.submit cimport (
    TICK_NS, between_ticks, catch_up, fail_call, release, release_stuck, submit, submit_in_turn, submit_when_room,
)
from engine_ext.control.driver cimport (
    Goal, Target, driver_await, driver_count_unnamed, driver_join, driver_note_done, driver_note_thread, driver_wait,
    driver_wait_for_all,
)
from engine_ext.control.native_calls cimport finishers_start
from engine_ext.control.stall cimport stall_join
from engine_ext.operations.kinds cimport kind_name, operation_of
from engine_ext.operations.op cimport OP_ABANDONED, OP_ASIDE, OP_DONE, OP_IN_TURN
from engine_ext.operations.operation cimport SAYS_ALIGNED
from engine_ext.platform.atomics cimport add32, and32, load32_acquire, load32_relaxed, now_ns, or32, store_pointer, store_release
from engine_ext.platform.clock cimport age_ns, overdue_ns, patience_at, patience_look, seconds_ns
from engine_ext.platform.posix cimport nanosleep, pthread_mutex_lock, pthread_mutex_unlock, timespec
from engine_ext.shared.layout cimport KINDS, UNNAMED_SHIFT, Status

import atexit
import os

from engine_ext.errors import EngineError


@cython.no_gc_clear                  # __dealloc__ needs the engine
cdef class Handle:
    """One submitted operation."""

    def __dealloc__(self):
        if self.op != NULL:
            abandon_op(self.state, self.op)
            self.op = NULL

    @property
    def done(self):
        """True if the operation is done, and on a GPU, if the device has passed it too; also if it has failed."""
        if self.op == NULL:
            return self.ticket == 0 or has_passed(self.state, self.ticket)
        return load32_acquire(&self.op.flags) & OP_DONE != 0 and (
            self.op.status != Status.OK or has_passed(self.state, self.op.ticket))

    @property
    def gathered(self):
        """The gathered memory, None if it went into the given output, and the rows of each rank."""
        if self.rows is None:
            raise EngineError(f"'{self.name}' has nothing gathered: call wait() first")
        return memoryview(self.memory) if isinstance(self.memory, Memory) else self.memory, self.rows

    @property
    def gathered_group(self):
        """The gathered members of a group, as of `group_parts`."""
        if self.parts is None:
            raise EngineError(f"'{self.name}' has no group gathered: call wait() first")
        return self.parts

    def notify(self, told):
        """Call `told` once when the operation is done, whatever its outcome; a handle does so once.

        If it is done, call it now, else on one of the threads that complete native calls.
        """
        if self.state.alive[0] != 1:
            expect_open(self.state)     # raises: a forked child has neither that thread nor the shared segment
        if self.told is not None:
            raise EngineError(f"'{self.name}' notifies somebody already")
        if self.op == NULL:
            return told()
        if not finishers_start():
            raise MemoryError("no thread can be started that ends operations")
        self.told, self.op.call = told, <void*>self
        Py_INCREF(self)
        with nogil:
            driver_note_done(self.state)
            driver_await(self.state, self.op)       # it counts as awaited, though no thread of this rank drives for it
        store_pointer(<void**>&self.op.finished, <void*>tell)
        if or32(&self.op.flags, OP_ABANDONED) & OP_DONE:        # else complete_op() hands it to a finisher
            tell_done(self.op)

    def set_aside(self, bint on):
        """Declare that the operation may stay undone forever, so that ranks it needs may leave; with `on` False, revoke that."""
        if self.op != NULL and on:
            or32(&self.op.flags, OP_ASIDE)
        elif self.op != NULL:
            and32(&self.op.flags, ~<uint32_t>OP_ASIDE)

    def release_tensor(self):
        """Make a message that has not begun use memory of its own instead of its tensor; return whether it does.

        The new memory is a copy of what is sent, or room for what is received.
        """
        cdef Op* op = self.op
        cdef Memory own
        cdef bint released = False
        if self.state.alive[0] != 1:
            expect_open(self.state)     # raises: a thread that a forked child lacks may hold the lock
        if op == NULL or not load32_relaxed(&op.flags) & OP_IN_TURN or load32_acquire(&op.flags) & OP_DONE:
            return False
        self.waiting += 1               # no other thread releases the operation meanwhile
        try:
            own = copy_memory(op.source, op.nbytes)
            pthread_mutex_lock(&self.state.lock)    # with the GIL, so two threads never do this at the same time
            if op.record != NULL and not op.begun:      # NULL: finished
                op.source, op.memory_bytes, released = own.data, op.nbytes, True
                op.target = own.data if op.nbytes else NULL     # a receive sends nothing
            pthread_mutex_unlock(&self.state.lock)
            if released:
                keep_alive(op, own)
        finally:
            self.waiting -= 1
        return released

    def wait(self):
        """Drive the engine until the operation is done; raise what went wrong with it."""
        self.wait_until(0)

    def wait_within(self, double seconds):
        """Wait as `wait` does, for at most `seconds`; return whether the operation is done."""
        return self.wait_until(max(seconds_ns(seconds), <uint64_t>1)) != 0

    cdef int wait_until(self, uint64_t limit_ns) except -1:
        """Wait for at most `limit_ns`; 0: without limit. Return whether the operation is done."""
        cdef Op* op = self.op
        if op == NULL:
            make_stream_wait(self.state, self.ticket, self.stream_of, NULL, False)
            return 1
        self.waiting += 1           # threads in here: the last to leave with success releases the operation
        try:
            if not wait_for(self.state, op, True, limit_ns):
                return 0
            self.take_result(op)
        finally:
            self.waiting -= 1
        if self.waiting == 0 and self.told is None:
            self.op = NULL
            free_when_passed(self.state, op)
        return 1

    cdef int take_result(self, Op* op) except -1:
        """Take the result of a finished operation, or raise what went wrong with it."""
        cdef State* e = self.state
        if op.status == Status.MISMATCH or op.status == Status.FAILED_CALL:
            if op.status == Status.FAILED_CALL and op.meta.root > 0:
                release(e, op.meta.root - 1, op)
            raise make_mismatch_error(e, op, f"'{self.name}'")
        if op.status != Status.OK:
            raise_refusal(e, op.status, self.name)
        if op.ticket:
            self.ticket, self.stream_of = op.ticket, op.stream_of
            make_stream_wait(e, op.ticket, op.stream_of, op, False)
        if op.result != NULL:
            self.take_allocated_result(op)
        elif op.memory != NULL and op.meta.group:
            self.parts = self.parts or group_parts(op.memory, op.row_counts, e.segment.size, op.meta.group)
        elif op.row_counts != NULL and self.rows is None:
            self.rows = tuple([op.row_counts[r] for r in range(e.segment.size)])
            if op.memory != NULL:
                self.memory = take_memory(op)
        elif op.rows and operation_of(&op.meta).says == SAYS_ALIGNED:       # other barriers are the engine's own, about a size
            catch_up(e, op.meta.dims)
        return 0

    cdef int take_allocated_result(self, Op* op) except -1:
        """Take the result from GPU tensors that the framework's allocator made, which `op` keeps while the device may write."""
        cdef State* e = self.state
        if op.meta.group:
            self.parts = list_group_parts(op, e.segment.size, <int>op.meta.group)
        else:
            self.rows = tuple([op.row_counts[r] for r in range(e.segment.size)])
            self.memory = (<list>op.result)[0]
        return 0


cdef enum:
    EXITING = 1 << 30           # bit of `running_notifications`: the interpreter exits, and no notification starts any more
    EXIT_LOOK_NS = 200000       # nanoseconds between two looks for running notifications
    EXIT_SECONDS = 5            # seconds that notified functions have to return

cdef uint32_t running_notifications = 0       # atomic: threads in `tell`, and the bit EXITING


cdef void tell(Op* op) noexcept nogil:
    """Call a handle's `told` on a finisher thread, unless the interpreter exits: it would end the thread in the middle of a
    call."""
    if add32(&running_notifications, 1) & EXITING == 0:
        with gil:
            tell_done(op)
    add32(&running_notifications, <uint32_t>-1)


def end_notifications(double seconds=EXIT_SECONDS):
    """Start no notification from now on, and wait at most `seconds` for running ones to return; return whether all have.

    Called as the interpreter exits.
    """
    cdef uint64_t begun = now_ns()
    cdef timespec pause
    pause.tv_sec, pause.tv_nsec = 0, EXIT_LOOK_NS
    or32(&running_notifications, EXITING)
    with nogil:
        while load32_acquire(&running_notifications) != EXITING and age_ns(now_ns(), begun) < seconds_ns(seconds):
            nanosleep(&pause, NULL)
    return load32_acquire(&running_notifications) == EXITING


def forget_tellers():
    """Forget notifying threads in a forked child, which does not have them."""
    and32(&running_notifications, EXITING)


atexit.register(end_notifications)      # runs after the engine's own exit handler, which is registered later
os.register_at_fork(after_in_child=forget_tellers)


cdef int tell_done(Op* op) except -1:
    """Call a handle's `told`, and give the operation back to the handle, which frees it at the last wait."""
    cdef Handle handle = <Handle>op.call
    told, handle.told = handle.told, None
    op.finished, op.call = NULL, NULL
    Py_DECREF(handle)
    told()
    return 0


cdef Handle begin_op(object engine, State* e, Op* op, object name, bint blocking, object output):
    """Submit an operation under `name`, or unnamed if it is None; return its handle. With `blocking`, wait up to a tick for
    it."""
    cdef Handle handle = Handle.__new__(Handle)
    handle.engine, handle.state, handle.output, handle.op = engine, e, output, op
    handle.name = submit(e, op, name, blocking)
    return handle


cdef Handle begin_in_turn(object engine, State* e, Op* op, str name):
    """Submit an operation under a name that may be in flight, behind those of that name; return its handle."""
    cdef Handle handle = Handle.__new__(Handle)
    handle.engine, handle.state, handle.op, handle.name = engine, e, op, name
    submit_in_turn(e, op, name)
    return handle


# ---- waiting ----------------------------------------------------------------------------------------------------------------

# Waiting in ticks: between two ticks Python handles its signals, and this rank looks for ranks that keep it waiting.

cdef int wait_for(State* e, Op* op, bint urgent, uint64_t limit_ns) except -1:
    """Wait until the engine has finished `op`, whatever its outcome, for at most `limit_ns`; 0: without limit.

    Return whether it is finished. `urgent`: its batch closes as soon as possible.
    """
    cdef Goal goal
    cdef uint64_t begun = 0
    cdef int status
    if load32_acquire(&op.flags) & OP_DONE:
        return 1
    expect_open(e)
    memset(&goal, 0, sizeof(Goal))
    goal.op = op
    if limit_ns:
        begun = patience_at(e.clock, now_ns())
    with nogil:
        if urgent:
            driver_await(e, op)
        status = driver_wait(e, &goal, tick_before(e, begun, limit_ns))
    if status != Status.TICK:
        return 1
    count_blocked(e, 1)
    driver_note_thread(e)
    if op.number and not load32_relaxed(&e.many_threads):
        # After the counts of what this rank has submitted: pairs with the acquire in release_stuck, which then reads those
        # counts.
        store_release(&e.segment.mine.waits_unnamed, <uint64_t>(op.meta.kind + 1) << UNNAMED_SHIFT | (op.number - 1))
    try:
        while status == Status.TICK and not overdue_ns(patience_look(e.clock), begun, limit_ns):
            between_ticks(e, op)
            release_stuck(e, op)
            with nogil:
                status = driver_wait(e, &goal, tick_before(e, begun, limit_ns))
    finally:
        store_release(&e.segment.mine.waits_unnamed, 0)
        count_blocked(e, -1)
    return status != Status.TICK


cdef inline uint64_t tick_before(State* e, uint64_t begun, uint64_t limit_ns) noexcept nogil:
    """Return the nanoseconds of the next tick of a wait that began at `begun`: at least 1."""
    cdef uint64_t passed
    if limit_ns == 0:
        return TICK_NS
    passed = age_ns(patience_at(e.clock, now_ns()), begun)
    return max(min(age_ns(limit_ns, passed), <uint64_t>TICK_NS), <uint64_t>1)


cdef void count_blocked(State* e, int one) noexcept:
    """Add 1 or -1 to the number of threads of this rank that have waited for longer than a tick."""
    add32(&e.segment.mine.blocked, <uint32_t>one)
    add32(&e.segment.world.mine.blocked_anywhere, <uint32_t>one)


cdef int wait_for_joins(State* e) except -1:
    """Submit nothing more until every rank has joined."""
    cdef Goal goal
    cdef uint64_t begun
    cdef int status, kind
    memset(&goal, 0, sizeof(Goal))
    goal.idle = True
    driver_wait_for_all(e, True)
    try:
        while True:                     # first, what is in flight
            with nogil:
                status = driver_wait(e, &goal, TICK_NS)
            if status == Status.OK:
                status = driver_join(e, &goal.joins)
            if status == Status.OK:
                break
            if status != Status.TICK:
                raise_refusal(e, status, "join")
            between_ticks(e, NULL)
    finally:
        driver_wait_for_all(e, False)
    goal.idle, begun, e.joins_reported = False, patience_at(e.clock, now_ns()), False
    with nogil:
        status = driver_wait(e, &goal, TICK_NS)
    while status == Status.TICK:
        PyErr_CheckSignals()
        with nogil:
            stall_join(e, begun)
            status = driver_wait(e, &goal, TICK_NS)
    if load32_acquire(&e.segment.joins) < goal.joins:
        raise_refusal(e, Status.FAILED_WORLD, "join")
    # The ranks have submitted different numbers of unnamed operations: all restart their counts together.
    for kind in range(KINDS):
        driver_count_unnamed(e, kind, 0)
    return 0


# ---- calls without a handle -------------------------------------------------------------------------------------------------

# A blocking allreduce in place, and a barrier. They avoid every Python object that they can: making one takes as long as the
# communication of a small tensor.

cdef bint reduce_directly(object engine, State* e, object tensor, object name, int op, object prescale,
                          object postscale) except -1:
    """Try to allreduce a tensor in place; return whether it is done.

    False: nothing was submitted. The caller then has to use the ordinary path, which takes all tensors and tells all ranks what
    is wrong with an argument.
    """
    cdef Target target
    cdef Op* brought
    memset(&target, 0, sizeof(Target))
    if type(prescale) is not float or type(postscale) is not float:
        return False
    if name is not None:
        try:
            target.text = expect_name(name, &target.text_bytes)
        except (TypeError, ValueError):
            return False
    try:
        brought = direct_allreduce_op(e, tensor, op, prescale, postscale)
    except Exception:           # the ordinary path meets the same error
        return False
    if brought == NULL:
        return False
    driver_note_thread(e)
    submit_and_wait(engine, e, brought, &target, tensor, name)
    return True


cdef int meet_directly(object engine, State* e, object name) except -1:
    """Wait until every rank has come to this barrier."""
    cdef Target target
    memset(&target, 0, sizeof(Target))
    if name is not None:
        target.text = expect_name(name, &target.text_bytes)
    submit_and_wait(engine, e, barrier_op(e, name, True), &target, None, name)
    return 0


cdef int submit_and_wait(object engine, State* e, Op* op, Target* target, object output, object name) except -1:
    """Submit an operation and wait for it; raise what goes wrong with it."""
    cdef Handle handle
    try:
        submit_when_room(e, target, op, True, name)
    except BaseException as error:
        if isinstance(error, MemoryError):          # of all other errors the engine itself tells the other ranks
            fail_call(e, kind_name(op.meta.kind).decode(), name, f"MemoryError: {error}")
        abandon_op(e, op)
        raise
    if load32_acquire(&op.flags) & OP_DONE and op.status == Status.OK:
        try:
            if op.rows:                 # a barrier behind which ranks align
                catch_up(e, op.meta.dims)
        finally:
            free_when_passed(e, op)
        return 0
    try:
        handle = Handle.__new__(Handle)
    except BaseException:
        abandon_op(e, op)
        raise
    handle.engine, handle.state, handle.output, handle.op = engine, e, output, op
    handle.name = target.label[:target.text_bytes].decode() if name is None else name
    handle.wait()
    return 0
