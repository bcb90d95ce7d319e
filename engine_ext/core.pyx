"""Engine and Handle: the one owner of native state, and the border to Python.

Reference counts are touched under the GIL only. An operation holds one reference to what keeps its tensors alive; its handle
frees it, or, when the handle went first, the graveyard does at the next call (docs/architecture/protocol.md, I9).
"""
cimport cython
from cpython.exc cimport PyErr_CheckSignals
from cpython.object cimport PyObject
from cpython.pythread cimport PyThread_get_thread_ident
from cpython.ref cimport Py_XDECREF, Py_INCREF
from cpython.unicode cimport PyUnicode_AsUTF8AndSize
from libc.errno cimport EPROTO
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.stdio cimport snprintf
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset

from engine_ext.bindings.arguments cimport (
    expect_reduction, expect_rows, expect_rows_reduction, fill_memory, fill_meta, may_share, same_shape, wire_number,
    wire_of,
)
from engine_ext.bindings.groups cimport group_add, group_expect_apart, group_gather, group_open, group_parts, group_sparse
from engine_ext.bindings.memory cimport Memory, Part
from engine_ext.bindings.view cimport View, expect_dense, view_of
from engine_ext.control.coordinator cimport coordinator_close, coordinator_open
from engine_ext.control.driver cimport (
    Goal, Name, driver_await, driver_call, driver_join, driver_pin, driver_start, driver_stop, driver_submit, driver_unpin,
    driver_wait,
)
from engine_ext.control.execute cimport raise_event
from engine_ext.control.marks cimport marks_add, marks_close, marks_open
from engine_ext.control.monitor cimport monitor_wait
from engine_ext.control.overlap cimport Overlap
from engine_ext.control.stall cimport stall_look_after, stall_tell
from engine_ext.control.state cimport EVENT_ABORT, EVENT_CLOSED, EVENT_SIGNAL, EVENT_STALL, State
from engine_ext.control.table cimport OP_ABANDONED, OP_DONE, Op, Record, bit, table_close, table_open
from engine_ext.control.trace cimport trace_close, trace_step
from engine_ext.data.executor cimport executor_close, executor_open
from engine_ext.kernels.kernels cimport ENGINE_ADASUM, ENGINE_FLOAT32, ENGINE_FLOAT64, engine_kernels_get
from engine_ext.knobs cimport knobs_of, knobs_with
from engine_ext.observe cimport counters_of, definitions_of, history_of, overdue_of, pending_of, ranks_of, steps_of
from engine_ext.platform.atomics cimport (
    add32, load32_acquire, load32_relaxed, load_acquire, load_pointer, load_relaxed, now_ns, or32, store32_release,
    store_relaxed, store_release, swap_pointer,
)
from engine_ext.platform.clock cimport after_ns, age_ns, overdue_ns, patience_at, patience_look, patience_open, seconds_ns
from engine_ext.platform.posix cimport (
    MADV_POPULATE_WRITE, MADV_WIPEONFORK, MAP_ANONYMOUS, MAP_FAILED, MAP_PRIVATE, PAGE, PROT_READ, PROT_WRITE,
    close as close_descriptor, madvise, mmap, munmap, pthread_mutex_destroy, pthread_mutex_init, pthread_mutex_lock,
    pthread_mutex_unlock,
)
from engine_ext.setup cimport kernel_level
from engine_ext.shared.counters cimport (
    COUNTED_ENDED, COUNTED_RUNNING, counters_map, counters_page, counters_put, counters_step, counters_unmap,
)
from engine_ext.shared.describe cimport kind_name
from engine_ext.shared.layout cimport (
    CAUSE_LEFT, CAUSE_RAISED, CAUSE_STALLED, COORDINATOR, FAILURE_BYTES, FAULT_CALL, KINDS, KIND_ALLGATHER, KIND_ALLREDUCE,
    KIND_ALLTOALL, KIND_BARRIER, KIND_BROADCAST, KIND_REDUCESCATTER, NAME_BYTES, Status, engine_knobs, segment_bytes,
)
from engine_ext.shared.segment cimport (
    abort_world, away, segment_append, segment_map, segment_unmap, segment_within, wake_others,
)
from engine_ext.transport.arena cimport arena_close, arena_forked, arena_grow, arena_locate, arena_map, arena_open
from engine_ext.transport.shm cimport shared_memory_open

import logging
from operator import index

from engine_ext.caller import place
from engine_ext.errors import (
    BY_CAUSE, ArgumentError, DuplicateNameError, EngineError, ForkedError, IncompatibleRanksError, MismatchError,
    NotInitializedError,
)

cdef extern from "<fcntl.h>" nogil:
    enum: FALLOC_FL_PUNCH_HOLE, FALLOC_FL_KEEP_SIZE
    int fallocate(int fd, int mode, long offset, long length)

cdef extern from "<sys/eventfd.h>" nogil:
    enum: EFD_CLOEXEC, EFD_NONBLOCK
    int eventfd(unsigned int initial, int flags)

cdef enum:
    GRACE_NS = 2000000000       # beyond what another rank's wait can last
    TICK_NS = 100000000         # how often a blocking call comes back for signals
    UNNAMED = 256               # operations without a name that can be outstanding
    SHORTEST_STEP_NS = 250000000    # of the time that a process sees pass: longer than a tick
    LONGEST_STEP_NS = 15000000000
    STUCK_SHIFT = 56            # rank_page.stuck: the kind above, the number below

LOGGER = logging.getLogger("engine")
KIND_NUMBERS = {kind_name(number).decode(): number for number in range(KINDS)}
CAUSES = {1: "died", 2: "failed", 3: "left while others still need it", 4: "stalled"}
LEFT_HINT = (". Did ranks make different numbers of steps? Give each as many batches, or let each call engine.join() after its "
             "last step")


# ---- operations ----------------------------------------------------------------------------------------------------

cdef Op* new_op() except NULL:
    cdef Op* op = <Op*>calloc(1, sizeof(Op))
    if op == NULL:
        raise MemoryError("no memory for an operation")
    op.meta.shared, op.meta.prescale, op.meta.postscale = -1, 1.0, 1.0
    return op


cdef void free_op(Op* op) noexcept:
    """The GIL is held and the engine has let go of `op`."""
    Py_XDECREF(<PyObject*>op.owner)
    free(op.memory)
    free(op.row_counts)
    free(op.splits)
    free(op.members)
    free(op.text)
    free(op)


cdef Memory take_memory(Op* op):
    cdef Memory memory = Memory.__new__(Memory)
    memory.data, memory.nbytes = op.memory, op.memory_bytes
    op.memory = NULL
    return memory


cdef object disagreement(int status, str what, str text):
    """What every rank raises of an operation that cannot be done, though the engine goes on."""
    if status == Status.FAILED_CALL:
        return MismatchError(f"{what} was not done: {text}")
    return MismatchError(f"ranks disagree on {what}: {text}")


cdef class Handle:
    """One submitted operation."""

    def __dealloc__(self):
        if self.op != NULL:
            if or32(&self.op.flags, OP_ABANDONED) & OP_DONE:
                free_op(self.op)
            self.op = NULL      # else complete() buries it

    @property
    def done(self):
        return self.op == NULL or load32_acquire(&self.op.flags) & OP_DONE != 0

    @property
    def gathered(self):
        if self.memory is None:
            raise EngineError(f"'{self.name}' has nothing gathered: call wait() first")
        return memoryview(self.memory), self.rows

    @property
    def gathered_group(self):
        if self.parts is None:
            raise EngineError(f"'{self.name}' has no group gathered: call wait() first")
        return self.parts

    def wait(self):
        """Drive the engine until the operation is done; raise what went wrong with it."""
        cdef Op* op = self.op
        if op == NULL:
            return
        self.waiting += 1           # threads in here: the last one to leave with success lets go of the operation
        try:
            self.engine.finish(op, True)
            self.conclude(op)
        finally:
            self.waiting -= 1
        if self.waiting == 0:
            self.op = NULL
            free_op(op)

    cdef int conclude(self, Op* op) except -1:
        """The operation is done: take what it brought, or raise what went wrong."""
        cdef int status = op.status
        cdef str text
        if status == Status.MISMATCH or status == Status.FAILED_CALL:
            if status == Status.FAILED_CALL and op.meta.root > 0:
                self.engine.release(op.meta.root - 1, op)
            text = op.text.decode("utf-8", "replace") if op.text != NULL else ""
            raise disagreement(status, f"'{self.name}'", text)
        if status != Status.OK:
            self.engine.refuse(status, self.name)
        if op.memory != NULL and op.meta.group:
            self.parts = self.parts or group_parts(op.memory, op.row_counts, self.engine.size, op.meta.group)
        elif op.memory != NULL:
            self.rows = tuple([op.row_counts[r] for r in range(self.engine.size)])
            self.memory = take_memory(op)
        elif op.meta.kind == KIND_BARRIER and op.rows:      # others, of the engine's own, agree on a size there
            self.engine.catch_up(op.meta.dims)
        return 0


# ---- the engine ----------------------------------------------------------------------------------------------------

@cython.no_gc_clear                  # __dealloc__ needs the world
cdef class Engine:
    """One rank's engine, in the world or in a process set."""

    def __cinit__(self, *args, **kwargs):
        self.state = <State*>calloc(1, sizeof(State))
        if self.state == NULL:
            raise MemoryError("no memory for the engine")
        self.state.world = self.state
        self.state.events_fd = self.state.arena.fd = self.control = -1
        self.shared = []

    def __init__(self, int rank, int size, int control, int arena, peers, *, dict knobs, stall_warning, stall_limit, spin_us,
                 int counters=-1, double yield_us=0.0):
        cdef State* e = self.state
        cdef int r
        if e.segment.header != NULL:
            raise EngineError("an engine is initialised once")
        self.control = control
        arena_open(&e.arena, arena, rank, size)
        if len(peers) != size:
            raise ValueError(f"{size} ranks have {size} pidfds, not {len(peers)}")
        e.peers = <int*>calloc(size, sizeof(int))
        for r in range(size if e.peers != NULL else 0):
            e.peers[r] = peers[r]
        e.events_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)
        if e.peers == NULL or e.events_fd < 0:
            raise MemoryError("no memory for the engine")
        self.settings = {
            "knobs": knobs, "stall_warning": stall_warning, "stall_limit": stall_limit, "spin_us": spin_us, "yield_us": yield_us,
            "counters": counters,
        }
        self.open(rank, tuple(range(size)), None, 0)

    cdef int open(self, int rank, tuple numbers, Engine world, uint64_t offset) except -1:
        """Start this rank's engine among `numbers`, in the segment at `offset` of the world's file."""
        cdef State* e = self.state
        cdef engine_knobs knobs
        cdef int status, r, size = <int>len(numbers)
        self.rank, self.size, self.numbers, self.number, self.offset = rank, size, numbers, numbers[rank], offset
        e.alive = <uint64_t*>mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
        if <void*>e.alive == MAP_FAILED:
            e.alive = NULL
            raise MemoryError("no memory for the engine")
        madvise(e.alive, PAGE, MADV_WIPEONFORK)
        e.alive[0] = 1
        if world is None and self.settings["counters"] >= 0:
            self.count_into(self.settings["counters"])
        memset(&knobs, 0, sizeof(engine_knobs))
        e.wanted = e.seen = knobs = knobs_with(knobs, self.settings["knobs"])
        e.fusion_threshold = knobs.fusion_threshold
        e.spin_ns = <uint64_t>(<double>self.settings["spin_us"] * 1e3)
        e.yield_ns = <uint64_t>(<double>self.settings["yield_us"] * 1e3)
        e.stall_warning_ns = seconds_ns(self.settings["stall_warning"])
        e.stall_limit_ns = seconds_ns(self.settings["stall_limit"])
        pthread_mutex_init(&e.lock, NULL)
        status = segment_map(&e.segment, self.control if world is None else world.control, offset, rank, size)
        if status == -EPROTO:
            raise IncompatibleRanksError(f"rank {rank} was given a control segment of another layout than this build's")
        if status < 0:
            raise OSError(-status, "cannot map the control segment")
        e.clock = &e.own_clock if world is None else world.state.clock
        if world is None:
            self.watch_time()
            self.end = segment_bytes(<uint32_t>size)
        else:
            for r in range(size):
                e.segment.numbers[r] = numbers[r]
            segment_within(&e.segment, &world.state.segment)
            self.world, e.world, e.page = world, world.state, world.state.page
        if (table_open(&e.table, &e.segment, e.clock) != Status.OK
                or executor_open(&e.executor, rank, size, shared_memory_open(&e.transport, &e.segment), &e.arena,
                                 engine_kernels_get(kernel_level()), e.clock) != Status.OK
                or (rank == COORDINATOR and coordinator_open(&e.coordinator, &e.segment, e.clock, &knobs) != Status.OK)):
            raise MemoryError("no memory for the engine's tables")
        e.coordinator.trace, e.coordinator.page = &e.trace, e.page
        if rank == COORDINATOR and e.page != NULL:
            store32_release(&e.segment.coordinator.recording, 1)
        status = driver_start(e)
        if status:
            raise OSError(status, "cannot start the engine thread")
        if world is not None:
            pthread_mutex_lock(&e.world.lock)
            e.beside, e.world.sets = e.world.sets, e
            pthread_mutex_unlock(&e.world.lock)
        return 0

    cdef void watch_time(self) noexcept:
        """Begin to see time pass, in steps that are short beside the limits on progress."""
        cdef State* e = self.state
        cdef uint64_t least = e.stall_limit_ns
        if least == 0 or 0 < e.stall_warning_ns < least:
            least = e.stall_warning_ns
        patience_open(&e.own_clock, min(max(least // 4, <uint64_t>SHORTEST_STEP_NS), <uint64_t>LONGEST_STEP_NS))
        e.look_ns = min(max(least // 8, <uint64_t>SHORTEST_STEP_NS // 2), <uint64_t>LONGEST_STEP_NS // 2) if least else 0

    cdef int count_into(self, int page) except -1:
        """Count into the memory of a descriptor, which stays the caller's."""
        cdef int status = counters_map(page, &self.page)
        if status == -EPROTO:
            raise IncompatibleRanksError("the page of counters is of another layout than this build's")
        if status < 0:
            raise OSError(-status, "cannot map the page of counters")
        self.state.page = self.page
        return 0

    def count(self, bint on):
        """For benchmarks: count, or do not for a while. Nothing is in flight, and there are no process sets."""
        cdef State* e = self.state
        cdef counters_page* page = self.page if on else NULL
        self.check()
        pthread_mutex_lock(&e.lock)
        e.page = e.coordinator.page = page
        memset(&e.overlap, 0, sizeof(Overlap))
        pthread_mutex_unlock(&e.lock)
        if self.rank == COORDINATOR:
            store32_release(&e.segment.coordinator.recording, page != NULL)

    def tell(self, **fields):
        cdef bytes name
        if self.page == NULL:
            return
        for word, value in fields.items():
            name = word.encode()
            if counters_put(self.page, name, <uint64_t>value) < 0:
                raise ValueError(f"{word} is no field of one word on the page of counters")

    def form(self, tuple numbers):
        """An engine for some ranks of the world, among themselves; None on the others. Collective over the world."""
        cdef State* e = self.state
        cdef Engine part = None
        cdef Op* op
        cdef uint64_t offset = self.end
        cdef int status = 0
        self.check()
        if self.world is not None:
            raise EngineError("process sets are formed by the world's engine")
        self.end += segment_bytes(<uint32_t>len(numbers))
        self.formed += 1
        # The coordinator's rank makes the segment before it brings the barrier, so every member finds it after.
        if self.rank == COORDINATOR:
            status = segment_append(&e.segment, self.control, offset, <int>len(numbers))
        if status < 0:
            raise OSError(-status, f"cannot make the control segment of a process set of {len(numbers)} ranks")
        op = new_op()
        op.meta.kind, op.meta.ndim, op.meta.dims[0] = KIND_BARRIER, 1, <int64_t>len(numbers)
        (<Handle>self.start(op, f"engine.form.{self.formed}", True, None, None)).wait()
        if self.rank in numbers:
            part = Engine.__new__(Engine)
            part.settings = self.settings
            part.open(numbers.index(self.rank), numbers, self, offset)
        return part

    def __dealloc__(self):
        cdef State* e = self.state
        cdef int r
        if e == NULL:
            return
        if e.alive != NULL and e.alive[0] == 1:     # not in a forked child: there nothing of this is ours
            if not self.closed and e.segment.header != NULL:
                self.leave_world()
                driver_stop(e)
            arena_close(&e.arena)
            if e.segment.header != NULL:
                table_close(&e.table)
                executor_close(&e.executor)
                coordinator_close(&e.coordinator)
                trace_close(&e.trace)
                pthread_mutex_destroy(&e.lock)
            segment_unmap(&e.segment)
            for r in range(self.size if e.peers != NULL else 0):
                close_descriptor(e.peers[r] if e.peers[r] >= 0 else -1 - e.peers[r])
            for descriptor in (e.events_fd, self.control):
                if descriptor >= 0:
                    close_descriptor(descriptor)
            if self.world is None:
                counters_unmap(self.page)
            munmap(e.alive, PAGE)
        free(e.peers)
        free(e.batch)
        free(e.told)
        marks_close(&e.marks)
        free(e)
        self.state = NULL

    cdef int check(self) except -1:
        """Every native entry: not in a forked child, not after close."""
        if self.state.alive == NULL or self.state.segment.header == NULL:
            raise NotInitializedError("this engine was never initialised")
        if self.state.alive[0] != 1:
            raise ForkedError(
                f"rank {self.number}'s engine was used in a forked child of its process, which is no rank. Use the engine in the "
                "parent only, or start the child with the 'spawn' method"
            )
        if self.closed and self.world is not None and not self.world.closed:
            raise NotInitializedError(
                f"the process set of ranks {', '.join(map(str, self.numbers))} was removed; unwrap() a distributed optimizer "
                "that belonged to it"
            )
        if self.closed:
            raise NotInitializedError(
                "this engine was shut down; call engine.init() again, and make anew what belonged to it: unwrap() a distributed "
                "optimizer and wrap it again"
            )
        self.bury()
        return 0

    cdef void bury(self) noexcept:
        """Free operations that are done and that nobody holds."""
        cdef Op* op
        cdef Op* after
        if load_pointer(&self.state.graveyard) == NULL:
            return
        op = <Op*>swap_pointer(&self.state.graveyard, NULL)
        while op != NULL:
            after = op.next
            free_op(op)
            op = after

    cdef object world_error(self):
        """The first cause, as every call raises it."""
        cdef uint64_t word = load_acquire(self.state.segment.abort)     # pairs with abort_world
        if word == 0:
            what = "the engine was shut down" if self.world is None or self.world.closed else "the process set was removed"
            return NotInitializedError(f"{what} while the operation was in flight")
        cdef int culprit = <int>(word & 0xFFFF) - 1, cause = <int>(word >> 16 & 0xFFFF), reporter = <int>(word >> 32)
        cdef str text = (<bytes>self.state.segment.world.pages[reporter].reason).decode("utf-8", "replace")
        seen = "" if reporter == culprit else f" (rank {reporter} noticed it first)"
        why = LEFT_HINT if cause == CAUSE_LEFT else ""
        return BY_CAUSE[cause](f"rank {culprit} {CAUSES[cause]}: {text}{why}{seen}", culprit)

    @property
    def failure(self):
        cdef State* e = self.state
        if e.segment.header == NULL or e.alive[0] != 1 or load_acquire(e.segment.abort) == 0:
            return None
        return self.world_error()

    cdef int refuse(self, int status, str name) except -1:
        if status == Status.FAILED_WORLD:
            raise self.world_error()
        if status == Status.DUPLICATE:
            raise DuplicateNameError(
                f"rank {self.number} submitted '{name}' again before its operation had completed; synchronize its handle first, "
                "or give each call a name of its own"
            )
        if status == Status.JOINED:
            raise EngineError(
                f"rank {self.number} brought '{name}' after join(): it brings nothing until every rank has joined; call join() "
                "after all else, and wait for it"
            )
        if status == Status.NO_MEMORY:
            raise MemoryError(f"no memory to submit '{name}'")
        raise EngineError(f"'{name}' ended with status {status}, which is a defect of the engine")

    cdef int between_ticks(self, Op* op) except -1:
        """A wait has lasted a tick: signals, stall limit, ranks that left. NULL: whichever has waited longest."""
        cdef State* e = self.state
        PyErr_CheckSignals()
        with nogil:
            stall_look_after(e, op)
        return 0

    cdef int finish(self, Op* op, bint urgent) except -1:
        """Wait until the engine has let go of `op`, whatever came of it. `urgent`: its batch closes as soon as it can."""
        cdef State* e = self.state
        cdef Goal goal
        cdef int status
        if load32_acquire(&op.flags) & OP_DONE:
            return 0
        self.check()
        memset(&goal, 0, sizeof(Goal))
        goal.op = op
        with nogil:
            if urgent:
                driver_await(e, op)
            status = driver_wait(e, &goal, TICK_NS)
        if status != Status.TICK:
            return 0
        self.count_blocked(1)
        self.note_thread()
        if op.number and not self.several:
            # After the numbers of what this rank has brought: pairs with the acquire in release_stuck, which then reads those.
            store_release(&e.segment.mine.stuck, <uint64_t>(op.meta.kind + 1) << STUCK_SHIFT | (op.number - 1))
        try:
            while status == Status.TICK:
                self.between_ticks(op)
                self.release_stuck(op)
                with nogil:
                    status = driver_wait(e, &goal, TICK_NS)
        finally:
            store_release(&e.segment.mine.stuck, 0)
            self.count_blocked(-1)
        return 0

    cdef void count_blocked(self, int one) noexcept:
        """Say that a thread of this rank has begun to wait for long, or has ceased to."""
        add32(&self.state.segment.mine.blocked, <uint32_t>one)
        add32(&self.state.segment.world.mine.blocked_anywhere, <uint32_t>one)

    cdef Handle start(self, Op* op, object name, bint blocking, object owner, object output):
        """Bring an operation under `name`, or the next of the unnamed. With `blocking`, wait up to a tick for it."""
        cdef Handle handle = Handle.__new__(Handle)
        cdef char[64] buffer
        cdef Name brought
        cdef Py_ssize_t length
        cdef unsigned long long number
        cdef int kind
        memset(&brought, 0, sizeof(Name))
        self.note_thread()
        handle.engine, handle.output, handle.op = self, output, op
        op.flags = OP_DONE                          # until it is brought, the handle alone owns it
        if owner is not None:
            Py_INCREF(owner)
            op.owner = <void*>owner
        if name is not None:
            brought.text = PyUnicode_AsUTF8AndSize(name, &length)
            brought.text_bytes, handle.name = <uint32_t>length, name
            if not 0 < length <= NAME_BYTES:
                raise ValueError(f"a name has 1 to {NAME_BYTES} bytes of UTF-8; this one has {length}")
            self.bring(&brought, handle, blocking, False)
            return handle
        # The number is taken before the GIL is released, or two threads would take the same one.
        kind, number = op.meta.kind, self.unnamed[op.meta.kind]
        self.count_unnamed(kind, number + 1)
        op.number = number + 1
        brought.text = buffer
        brought.text_bytes = <uint32_t>snprintf(buffer, 64, "%s.noname.%llu", kind_name(kind), number % UNNAMED)
        handle.name = buffer[:brought.text_bytes].decode()
        try:
            self.bring(&brought, handle, blocking, True)
        except BaseException:
            if self.unnamed[kind] == number + 1:        # nothing was brought, and no other thread has gone on from there
                self.count_unnamed(kind, number)
            raise
        return handle

    cdef int bring(self, const Name* name, Handle handle, bint blocking, bint unnamed) except -1:
        """Hand the operation of `handle` over to the engine, when there is room for it."""
        cdef State* e = self.state
        cdef Op* op = handle.op
        cdef int status
        while True:
            op.flags = 0
            with nogil:
                status = driver_call(e, name, op, TICK_NS) if blocking else driver_submit(e, name, op)
            if status == Status.OK or status == Status.TICK:
                return 0
            op.flags = OP_DONE
            if status == Status.NO_ROOM or status == Status.AFTER_FAILURE or (status == Status.DUPLICATE and unnamed):
                self.make_room(name, status)
            else:
                self.refuse(status, handle.name)

    cdef int make_room(self, const Name* name, int status) except -1:
        """Flow control: wait until the coordinator has read requests, or what is in flight under a name is done."""
        cdef State* e = self.state
        cdef Goal goal
        cdef int waited
        cdef uint64_t begun = patience_at(e.clock, now_ns())
        memset(&goal, 0, sizeof(Goal))
        if status == Status.NO_ROOM:
            goal.drained = load_acquire(&e.segment.coordinator.drained[self.rank])
            if goal.drained == load_acquire(&e.segment.mine.request_head):
                return 0            # read in the meantime: there is nothing to wait for
        else:
            goal.record = name.record if name.record != NULL else driver_pin(e, name.text, name.text_bytes)
            if goal.record == NULL:
                raise MemoryError("no memory for a name")
        try:
            while True:
                with nogil:
                    waited = driver_wait(e, &goal, TICK_NS)
                if waited == Status.OK:
                    return 0
                self.between_ticks(NULL)
                if status == Status.AFTER_FAILURE:
                    self.expect_heard(goal.record, begun)
        finally:
            if goal.record != NULL and name.record == NULL:
                driver_unpin(e, goal.record)

    cdef int expect_heard(self, const Record* record, uint64_t begun) except -1:
        """The ranks have yet to hear of a failed call. No operation is overdue meanwhile: this rank's own wait has a limit."""
        cdef State* e = self.state
        # Pairs with the release in close.
        cdef bint left = self.rank != COORDINATOR and load32_acquire(&e.segment.pages[COORDINATOR].left)
        if left or overdue_ns(patience_look(e.clock), begun, e.stall_limit_ns):
            raise DuplicateNameError(
                f"a call of '{record.name[:record.name_bytes].decode('utf-8', 'replace')}' has failed on rank {self.number}, and "
                "other ranks have not called it since: it cannot be called again before they have"
            )
        return 0

    # ---- calls that fail on one rank

    def fail(self, str kind, name, str reason):
        """Bring word that this rank's call has failed, in the place of the operation that it would have brought: so every rank
        hears of it when it comes to that operation, and the numbers of unnamed ones stay in step."""
        if self.state.alive != NULL and self.state.alive[0] == 1 and not self.closed:
            first_line = reason.partition("\n")[0]
            self.bring_failure(KIND_NUMBERS[kind], name, f"failed at {place()}: {first_line}", False)

    cdef int bring_failure(self, int kind, object name, str text, bint waits) except -1:
        """Whether it was brought. `waits`: for the ranks that have brought the operation, and they for this one."""
        cdef bytes told = text.encode("utf-8", "replace")[:FAILURE_BYTES]
        cdef Op* op = new_op()
        op.meta.kind, op.meta.fault, op.meta.root = <unsigned char>kind, FAULT_CALL, waits
        op.text = <char*>malloc(len(told) + 1)
        if op.text == NULL:
            free_op(op)
            raise MemoryError("no memory to tell of a failed call")
        memcpy(op.text, <const char*>told, len(told) + 1)
        try:
            self.start(op, name, False, None, None)
        except (EngineError, TypeError, ValueError):
            return 0        # it cannot be brought, nor could the operation: no world, a rank that has joined, no such name
        return 1

    cdef void count_unnamed(self, int kind, uint64_t count) noexcept:
        """Before the operation is brought: who sees that, or `stuck`, sees the number too."""
        self.unnamed[kind] = count
        store_relaxed(&self.state.segment.mine.unnamed[kind], count)

    cdef void note_thread(self) noexcept:
        """Note whether one thread alone has used this engine: only then does its wait mean that nothing more comes from here."""
        cdef unsigned long thread = <unsigned long>PyThread_get_thread_ident()
        if self.thread == 0:
            self.thread = thread
        if self.thread != thread and not self.several:
            self.several = True
            store_release(&self.state.segment.mine.stuck, 0)    # said by the first thread, of a rank with no other

    cdef int catch_up(self, const int64_t* counts) except -1:
        """Behind a barrier: bring failures for the unnamed operations that other ranks brought before it and this one did not."""
        cdef int kind
        for kind in range(KINDS):
            if kind != KIND_BARRIER and self.unnamed[kind] < <uint64_t>counts[kind]:
                self.skip(kind, <uint64_t>counts[kind], "came to a barrier without it", False)
        return 0

    cdef int skip(self, int kind, uint64_t count, str why, bint waits) except -1:
        """Bring failures for unnamed operations that this rank has left out, until it has brought `count` of that kind."""
        cdef str where = place()
        LOGGER.warning(
            "rank %d has brought %d unnamed operations of kind %s, other ranks %d: it %s, at %s. What it has left out fails on "
            "every rank", self.number, self.unnamed[kind], kind_name(kind).decode(), count, why, where)
        while self.unnamed[kind] < count and self.bring_failure(kind, None, f"{why}, at {where}", waits):
            pass            # else this rank is gone, or has joined: another thread of it has gone on
        return 0

    cdef int release_stuck(self, Op* op) except -1:
        """The only thread of this rank waits for `op`, and has done so for longer than a tick.

        Another rank whose only thread waits for an unnamed operation that this rank has not brought, and which itself has not
        brought `op`, would wait for this one for ever, and this one for it. So this rank tells that it has left that operation
        out, and the other one does the same. A barrier is spared: there the ranks are to come together.
        """
        cdef int r
        for r in range(self.size if not self.several else 0):
            if r != self.rank and load_acquire(&self.state.segment.pages[r].stuck) and self.withholds(r, op):
                self.release(r, op)
        return 0

    cdef int release(self, int rank, Op* op) except -1:
        """Tell a rank that waits for an unnamed operation that this one has left it out: it waits for `op`, or has done so until
        that rank told the same."""
        cdef uint64_t stuck = load_acquire(&self.state.segment.pages[rank].stuck)
        cdef uint64_t number = stuck & ((<uint64_t>1 << STUCK_SHIFT) - 1)
        cdef int kind = <int>(stuck >> STUCK_SHIFT) - 1
        if stuck and not self.several and kind != KIND_BARRIER and self.unnamed[kind] <= number:
            self.skip(kind, number + 1, f"waits for {self.name_of(op)}, which rank {self.numbers[rank]} has not brought", True)
        return 0

    cdef bint withholds(self, int rank, Op* op) noexcept:
        """Whether another rank is known not to have brought an operation of this one. Of a new name only rank 0 knows it."""
        cdef State* e = self.state
        cdef bint missing = False
        if op.number:
            return load_acquire(&e.segment.pages[rank].unnamed[op.meta.kind]) < op.number
        pthread_mutex_lock(&e.lock)
        if op.record != NULL and op.record.id >= 0:
            missing = bit(e.segment.pages[rank].ready, op.record.id) != bit(e.segment.mine.ready, op.record.id)
        pthread_mutex_unlock(&e.lock)
        return missing

    cdef str name_of(self, Op* op):
        cdef char[NAME_BYTES] name
        cdef uint32_t length = 0
        if op.number:
            return f"'{kind_name(op.meta.kind).decode()}.noname.{(op.number - 1) % UNNAMED}'"
        pthread_mutex_lock(&self.state.lock)
        if op.record != NULL:           # else it is finished
            length = op.record.name_bytes
            memcpy(name, op.record.name, length)
        pthread_mutex_unlock(&self.state.lock)
        return f"'{name[:length].decode('utf-8', 'replace')}'"

    # ---- collectives

    def allreduce(self, tensor, output, name, int op, double prescale, double postscale, bint blocking=False, wire=None):
        cdef View source, target
        cdef Op* brought
        cdef object keeper, kept
        cdef int chosen = wire_number(wire, op)
        self.check()
        keeper = view_of(tensor, &source)
        expect_dense(tensor, &source, "the tensor")
        expect_reduction(&source, op, prescale, postscale, self.size)
        kept = same_shape(tensor, &source, output, &target, source.dims[0])
        brought = new_op()
        fill_meta(&brought.meta, KIND_ALLREDUCE, &source)
        brought.meta.op, brought.meta.prescale, brought.meta.postscale = <unsigned char>op, prescale, postscale
        brought.meta.wire = wire_of(chosen, source.dtype)
        fill_memory(brought, &source, &target)
        if source.data == target.data and op != ENGINE_ADASUM and may_share(&brought.meta):
            # Adasum measures before it writes.
            brought.meta.shared = arena_locate(&self.state.arena, source.data, source.nbytes)
        return self.start(brought, name, blocking, (tensor, output, keeper, kept), output)

    def allreduce_group(self, list tensors, list outputs, name, int op, double prescale, double postscale, bint blocking=False,
                        wire=None):
        """One operation on several tensors: scheduled when every rank has brought it, or not at all."""
        return self.reduce_group(KIND_ALLREDUCE, tensors, outputs, name, op, prescale, postscale, blocking, wire)

    def reducescatter_group(self, list tensors, list outputs, name, int op, double prescale, double postscale,
                            bint blocking=False, wire=None):
        return self.reduce_group(KIND_REDUCESCATTER, tensors, outputs, name, op, prescale, postscale, blocking, wire)

    cdef Handle reduce_group(self, int kind, list tensors, list outputs, object name, int op, double prescale, double postscale,
                             bint blocking, object wire):
        cdef View source, target
        cdef Op* brought
        cdef list keepers = []
        cdef Py_ssize_t k, count = len(tensors)
        cdef int64_t rows
        cdef int chosen = wire_number(wire, op)
        self.check()
        if len(outputs) != count:
            raise ValueError(f"a group of {count} tensors has as many outputs, not {len(outputs)}")
        brought = new_op()
        try:
            group_open(brought, kind, count)
            for k in range(count):
                keepers.append(group_add(brought, k, tensors[k], &source))
                expect_reduction(&source, op, prescale, postscale, self.size)
                rows = source.dims[0]
                if kind == KIND_REDUCESCATTER:
                    expect_rows_reduction(op)
                    expect_rows(tensors[k], &source, "a reduce-scatter divides")
                    rows = source.dims[0] // self.size + (self.rank < source.dims[0] % self.size)
                keepers.append(same_shape(tensors[k], &source, outputs[k], &target, rows))
                brought.members[k].target = target.data
            if kind == KIND_ALLREDUCE and tensors is outputs:
                group_expect_apart(brought)
        except BaseException:
            free_op(brought)
            raise
        brought.meta.op, brought.meta.prescale, brought.meta.postscale = <unsigned char>op, prescale, postscale
        if brought.meta.dims[ENGINE_FLOAT32] or brought.meta.dims[ENGINE_FLOAT64]:
            brought.meta.wire = <unsigned char>chosen
        return self.start(brought, name, blocking, (tensors, outputs, keepers), outputs)

    def broadcast(self, tensor, output, name, Py_ssize_t root, bint blocking=False):
        cdef View source, target
        cdef Op* brought
        cdef object keeper, kept
        self.check()
        if root not in self.numbers:
            where = f"this world of {self.size} ranks (0 to {self.size - 1})" if self.world is None else \
                f"this process set, which has ranks {', '.join(map(str, self.numbers))} of the world"
            raise ArgumentError(f"root rank {root} is not in {where}")
        keeper = view_of(tensor, &source)
        expect_dense(tensor, &source, "the tensor")
        kept = same_shape(tensor, &source, output, &target, source.dims[0])
        brought = new_op()
        fill_meta(&brought.meta, KIND_BROADCAST, &source)
        brought.meta.root = <int32_t>root
        fill_memory(brought, &source, &target)
        return self.start(brought, name, blocking, (tensor, output, keeper, kept), output)

    def allgather(self, tensor, name, bint blocking=False):
        cdef View source
        cdef Op* brought
        cdef object keeper
        self.check()
        keeper = view_of(tensor, &source)
        expect_rows(tensor, &source, "an allgather joins")
        brought = new_op()
        fill_meta(&brought.meta, KIND_ALLGATHER, &source)
        brought.meta.dims[0] = 0
        brought.rows, brought.row_bytes = source.dims[0], self.row_bytes(&source)
        fill_memory(brought, &source, &source)
        brought.target = NULL
        return self.start(brought, name, blocking, (tensor, keeper), None)

    def allgather_group(self, list tensors, name, bint blocking=False, sparse=None):
        cdef View source
        cdef Op* brought
        cdef list keepers = []
        cdef Py_ssize_t k, count = len(tensors)
        self.check()
        brought = new_op()
        try:
            group_open(brought, KIND_ALLGATHER, count)
            for k in range(count):
                keepers.append(group_add(brought, k, tensors[k], &source))
                expect_rows(tensors[k], &source, "an allgather joins")
            group_gather(brought)
            if sparse is not None:
                shape, brought.meta.op, brought.meta.prescale, brought.meta.postscale, fault = sparse
                group_sparse(brought, shape, fault)
        except BaseException:
            free_op(brought)
            raise
        return self.start(brought, name, blocking, (tensors, keepers), None)

    def alltoall(self, tensor, splits, name, bint blocking=False):
        cdef View source
        cdef Op* brought
        cdef object keeper
        cdef int r
        self.check()
        keeper = view_of(tensor, &source)
        expect_rows(tensor, &source, "an all-to-all sends")
        counts = [index(each) for each in splits]
        if len(counts) != self.size:
            raise ArgumentError(f"splits says how many rows go to each of {self.size} ranks, but has {len(counts)} numbers")
        if min(counts) < 0 or sum(counts) > source.dims[0]:
            raise ArgumentError(f"splits {counts} cannot be taken from the {source.dims[0]} rows of the tensor")
        brought = new_op()
        try:
            fill_meta(&brought.meta, KIND_ALLTOALL, &source)
            brought.meta.dims[0] = 0
            brought.row_bytes = self.row_bytes(&source)
            brought.splits = <int64_t*>malloc(<size_t>self.size * sizeof(int64_t))
            if brought.splits == NULL:
                raise MemoryError("no memory for splits")
            for r in range(self.size):
                brought.splits[r] = counts[r]
        except BaseException:
            free_op(brought)
            raise
        fill_memory(brought, &source, &source)
        brought.target = NULL
        return self.start(brought, name, blocking, (tensor, keeper), None)

    def reducescatter(self, tensor, output, name, int op, double prescale, double postscale, bint blocking=False, wire=None):
        cdef View source, target
        cdef Op* brought
        cdef object keeper, kept
        cdef int64_t rows
        cdef int chosen = wire_number(wire, op)
        self.check()
        keeper = view_of(tensor, &source)
        expect_rows(tensor, &source, "a reduce-scatter divides")
        expect_rows_reduction(op)
        expect_reduction(&source, op, prescale, postscale, self.size)
        rows = source.dims[0] // self.size + (self.rank < source.dims[0] % self.size)
        kept = same_shape(tensor, &source, output, &target, rows)
        brought = new_op()
        fill_meta(&brought.meta, KIND_REDUCESCATTER, &source)
        brought.meta.op, brought.meta.prescale, brought.meta.postscale = <unsigned char>op, prescale, postscale
        brought.meta.wire, brought.row_bytes = wire_of(chosen, source.dtype), self.row_bytes(&source)
        fill_memory(brought, &source, &target)
        return self.start(brought, name, blocking, (tensor, output, keeper, kept), output)

    cdef uint64_t row_bytes(self, const View* view) noexcept:
        cdef uint64_t nbytes = <uint64_t>view.itemsize
        cdef int d
        for d in range(1, view.ndim):
            nbytes *= <uint64_t>view.dims[d]
        return nbytes

    def barrier(self, name, bint blocking=False):
        cdef Op* brought
        self.check()
        brought = new_op()
        brought.meta.kind = KIND_BARRIER
        self.note_thread()
        brought.rows = name is None and blocking and not self.several       # whether ranks come together behind it
        return self.start(brought, name, blocking, None, None)

    def join(self):
        """Bring nothing until every rank has called this; the last that did. Collective."""
        cdef State* e = self.state
        cdef Goal goal
        cdef int status
        cdef uint64_t begun = 0
        cdef int kind
        self.check()
        memset(&goal, 0, sizeof(Goal))
        goal.idle = True
        with nogil:
            status = driver_wait(e, &goal, TICK_NS)
        while True:                         # what is in flight first
            if status == Status.OK:
                status = driver_join(e, &goal.joins)
            if status == Status.OK:
                break
            if status != Status.TICK:
                self.refuse(status, "join")
            self.between_ticks(NULL)
            with nogil:
                status = driver_wait(e, &goal, TICK_NS)
        goal.idle, begun = False, patience_at(e.clock, now_ns())
        with nogil:
            status = driver_wait(e, &goal, TICK_NS)
        while status == Status.TICK:
            self.expect_joins(begun)
            with nogil:
                status = driver_wait(e, &goal, TICK_NS)
        if load32_acquire(&e.joins) < goal.joins:
            self.refuse(Status.FAILED_WORLD, "join")
        # The ranks have brought different numbers of unnamed operations: count anew, together.
        for kind in range(KINDS):
            self.count_unnamed(kind, 0)
        return e.last_joined

    @property
    def joined(self):
        return self.state.joined

    @property
    def joins(self):
        return load32_acquire(&self.state.joins)

    cdef int expect_joins(self, uint64_t begun) except -1:
        """A wait for other ranks to join has lasted a tick. It may last, as long as they go on; not when nothing happens any more
        or one of them has left."""
        cdef State* e = self.state
        cdef uint64_t seen = patience_look(e.clock), quiet = age_ns(seen, max(begun, e.executor.progressed))
        cdef int r
        PyErr_CheckSignals()
        missing = [r for r in range(self.size) if not away(&e.segment, r)]
        # Who waits itself is kept from joining, and says by whom when its own limit is over; if it does not, it is the one.
        at_fault = [r for r in missing if load32_relaxed(&e.segment.pages[r].blocked) == 0]
        if not at_fault and quiet >= after_ns(after_ns(e.stall_limit_ns, e.stall_limit_ns), GRACE_NS):
            at_fault = missing
        text = f"has not joined, and brought nothing, for {quiet / 1e9:.1f} s"
        for r in missing:
            if load32_acquire(&e.segment.pages[r].left):
                abort_world(&e.segment, r, CAUSE_LEFT, b"it did not join")
                return 0
        if at_fault and e.stall_limit_ns and quiet >= e.stall_limit_ns:
            abort_world(&e.segment, at_fault[0], CAUSE_STALLED, text.encode())
        elif missing and e.stall_warning_ns and quiet >= e.stall_warning_ns and not self.warned:
            self.warned = True
            late = ", ".join([str(self.numbers[r]) for r in missing])
            who = f"rank{'s' if len(missing) > 1 else ''} {late}"
            stall_tell(e, f"join has waited {quiet / 1e9:.0f} s for {who}, and nothing was brought".encode())
        wake_others(&e.segment, 0)
        return 0

    def share(self, uint64_t nbytes):
        cdef State* e = self.state
        cdef Part part
        cdef Op* op
        cdef uint64_t begin, end
        cdef int status = 0, region = 0, r
        self.check()
        if self.world is not None:
            raise EngineError("tensors are shared by all ranks of the world, not by a process set")
        if nbytes == 0:
            raise ValueError("a shared region has at least one byte")
        # The coordinator's rank makes the file long enough before it brings the barrier, so every rank finds it so after.
        if self.rank == COORDINATOR:
            status = arena_grow(&e.arena, nbytes)
            if status < 0:
                raise OSError(-status, f"cannot allocate {nbytes} shared bytes for each of {self.size} ranks")
        self.regions += 1
        for populate in (True, False):
            op = new_op()
            op.meta.kind, op.meta.ndim, op.meta.dims[0] = KIND_BARRIER, 1, <int64_t>nbytes
            (<Handle>self.start(op, f"engine.share.{self.regions}", True, None, None)).wait()
            if populate:
                region = arena_map(&e.arena, nbytes)
                if region < 0:
                    raise OSError(-region, f"cannot map {nbytes} shared bytes of each of {self.size} ranks")
                with nogil:     # own pages now, the others' after everybody has made theirs: not in the first step
                    madvise(e.arena.regions[region].bases[e.segment.rank], e.arena.regions[region].part, MADV_POPULATE_WRITE)
        # Of the others' parts this rank writes the share that it reduces: page tables of that cost as much as those of its own
        # part. Rank 0 has the first share of a batch, which is the end of the region, since the last parameters' gradients come
        # first. Where the batches are cut otherwise the first step faults in what is missing.
        begin = e.arena.regions[region].part // PAGE * <uint64_t>(self.size - 1 - self.rank) // <uint64_t>self.size * PAGE
        end = e.arena.regions[region].part // PAGE * <uint64_t>(self.size - self.rank) // <uint64_t>self.size * PAGE
        with nogil:
            for r in range(e.segment.size):
                if end > begin:
                    madvise(e.arena.regions[region].bases[r] + begin, end - begin, MADV_POPULATE_WRITE)
        part = Part.__new__(Part)
        part.base, part.nbytes = e.arena.regions[region].bases[self.rank], nbytes
        self.shared.append(part)
        return memoryview(part)

    # ---- knobs and what is known

    def set_knobs(self, **changes):
        cdef State* e = self.state
        cdef engine_knobs chosen
        self.check()
        if self.rank != COORDINATOR:
            raise EngineError(f"knobs are set on the coordinator, rank 0; this is rank {self.rank}")
        chosen = knobs_with(e.wanted, changes)      # before the lock is taken: it may raise. `wanted` is written here alone.
        chosen.version += 1
        pthread_mutex_lock(&e.lock)
        e.wanted = chosen
        store32_release(&e.wanted_new, 1)
        pthread_mutex_unlock(&e.lock)
        return chosen.version

    def knobs(self):
        return knobs_of(self.state)

    @property
    def compressible(self):
        return load_relaxed(&self.state.coordinator.tuned) != 0

    def counters(self):
        return counters_of(self.state)

    def history(self):
        return history_of(self.state)

    def pending(self):
        return pending_of(self.state)

    def ranks(self):
        return ranks_of(self.state)

    def overdue(self):
        return overdue_of(self.state)

    def mark_step(self, int number=0):
        cdef State* e = self.state
        self.check()
        store_release(&e.segment.mine.steps, e.segment.mine.steps + 1)      # pairs with coordinator_step
        if load32_relaxed(&e.trace.on):
            pthread_mutex_lock(&e.lock)
            trace_step(&e.trace, now_ns())
            pthread_mutex_unlock(&e.lock)
        if e.page != NULL:
            pthread_mutex_lock(&e.lock)
            e.step_begun = counters_step(e.page, e.step_begun)
            pthread_mutex_unlock(&e.lock)
        if e.marks.ring != NULL:    # set once, under the GIL
            pthread_mutex_lock(&e.lock)
            marks_add(&e.marks, number, e.seen.version, load_relaxed(&e.counters.wait_ns), load_relaxed(&e.counters.nbytes))
            pthread_mutex_unlock(&e.lock)

    def record_steps(self):
        cdef State* e = self.state
        cdef int status
        pthread_mutex_lock(&e.lock)
        status = marks_open(&e.marks)
        pthread_mutex_unlock(&e.lock)
        if status < 0:
            raise MemoryError("no memory for the times of steps")

    def steps(self, uint64_t since):
        return steps_of(self.state, since)

    def definitions(self):
        return definitions_of(self.state)

    def mark_traffic(self, str name=None, uint32_t every=1, uint32_t window=0):
        cdef State* e = self.state
        cdef Record* anchor = NULL
        cdef Record* before
        cdef const char* text
        cdef Py_ssize_t length
        self.check()
        if name is not None:
            text = PyUnicode_AsUTF8AndSize(name, &length)
            if not 0 < length <= NAME_BYTES:
                raise ValueError(f"a name has 1 to {NAME_BYTES} bytes of UTF-8; this one has {length}")
            anchor = driver_pin(e, text, <uint32_t>length)
            if anchor == NULL:
                raise MemoryError("no memory for a name")
        pthread_mutex_lock(&e.lock)
        before, e.marks.anchor = e.marks.anchor, anchor
        e.marks.every, e.marks.window, e.marks.passed = every, window, 0
        pthread_mutex_unlock(&e.lock)
        store32_release(&e.marks.timed, window != 0)
        if before != NULL:
            driver_unpin(e, before)

    # ---- failure and the end

    def forked(self):
        """To be called in every forked child: makes its view of shared tensors its own."""
        if self.state.alive != NULL and self.state.alive[0] != 1:
            arena_forked(&self.state.arena)

    def monitor(self):
        cdef int events
        if self.state.alive[0] != 1:
            return "closed"
        with nogil:
            events = monitor_wait(self.state)
        if events & EVENT_CLOSED:
            return "closed"
        # One at a time, the gravest first; what is left comes with the next call.
        for event, name in ((EVENT_ABORT, "abort"), (EVENT_STALL, "stall"), (EVENT_SIGNAL, "signal")):
            if events & event:
                if events & ~event:
                    raise_event(self.state, events & ~event)
                return name
        return "closed"

    def notify_signal(self):
        if self.state.alive[0] == 1 and not self.closed:
            raise_event(self.state, EVENT_SIGNAL)

    def abort(self, str reason):
        cdef bytes text
        if self.state.alive[0] == 1 and not self.closed:
            text = reason.encode("utf-8", "replace")
            abort_world(&self.state.segment, self.rank, CAUSE_RAISED, text)

    def close(self, double timeout):
        cdef State* e = self.state
        cdef Goal goal
        cdef uint64_t begun, limit
        if self.closed or e.alive == NULL or e.alive[0] != 1 or e.segment.header == NULL:
            return
        memset(&goal, 0, sizeof(Goal))
        goal.idle = True
        begun, limit = patience_at(e.clock, now_ns()), seconds_ns(timeout)
        try:
            while age_ns(patience_look(e.clock), begun) < limit:
                with nogil:
                    status = driver_wait(e, &goal, TICK_NS)
                if status == Status.OK:
                    break
                PyErr_CheckSignals()
        finally:
            self.closed = True
            self.leave_world()
            with nogil:
                driver_stop(e)
            # After the last chunk that this rank passes; pairs with the acquire of whoever needs this rank, and of monitors.
            store32_release(&e.segment.mine.left, 1)
            wake_others(&e.segment, 0)
            for part in self.shared:
                (<Part>part).detached = True
            arena_close(&e.arena)
            self.shared = []
            if self.world is None and e.page != NULL and load_relaxed(e.page.state) == COUNTED_RUNNING:
                store_relaxed(e.page.state, COUNTED_ENDED)
                store_relaxed(e.page.stalled, 0)
            if self.world is None:
                raise_event(e, EVENT_CLOSED)
                close_descriptor(self.control)
                self.control = -1
            self.bury()

    def reclaim(self):
        """Give back the memory of a process set that all its members have closed. One of them does it."""
        if self.world is not None and self.closed and not self.world.closed:
            fallocate(self.world.control, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, <long>self.offset,
                      <long>segment_bytes(<uint32_t>self.size))

    cdef void leave_world(self) noexcept:
        """A process set that ends is not to be woken with its world."""
        cdef State** link = &self.state.world.sets
        if self.world is None:
            return
        pthread_mutex_lock(&self.state.world.lock)
        while link[0] != NULL and link[0] != self.state:
            link = &link[0].beside
        if link[0] != NULL:
            link[0] = self.state.beside
        pthread_mutex_unlock(&self.state.world.lock)
