"""Engine: the only owner of native state, and the border to Python.

The functions that submit, wait and refuse are in bindings/, and those that describe the state in snapshots.pyx. They work on the
native state.
"""
cimport cython
from cpython.exc cimport PyErr_CheckSignals
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid
from cpython.ref cimport Py_INCREF
from libc.errno cimport EPROTO
from libc.stdint cimport uint32_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from engine_ext.bindings.calls cimport calls_admit, calls_dismiss, calls_settle
from engine_ext.bindings.collectives cimport (
    allgather_group_op, allgather_op, allreduce_op, alltoall_op, barrier_op, broadcast_op, receive_op, reduce_group_op,
    reducescatter_op, send_op, size_barrier_op,
)
from engine_ext.bindings.devices cimport finish_device, serve_allocations, stop_allocations
from engine_ext.bindings.handles cimport begin_in_turn, begin_op, meet_directly, reduce_directly, wait_for_joins
from engine_ext.bindings.memory cimport Part, free_deferred, grow_arena, map_region, part_of
from engine_ext.bindings.observing cimport (
    map_page, mark_step, mark_traffic, note_collection, note_input, record_steps, set_fields,
)
from engine_ext.bindings.refusals cimport expect_open, world_error
from engine_ext.bindings.submit cimport TICK_NS, fail_call
from engine_ext.control.completion cimport raise_event
from engine_ext.control.device_entries cimport use_device
from engine_ext.control.driver cimport Goal, driver_wait, driver_wait_for_all
from engine_ext.control.engines cimport engines_enter, engines_leave
from engine_ext.control.failure cimport claim_outwait
from engine_ext.control.monitor cimport monitor_wait
from engine_ext.control.observers cimport (
    observers_close, observers_count, observers_forked, observers_leave_group, observers_name_group, observers_open,
)
from engine_ext.control.stall cimport all_are_aside, stall_open
from engine_ext.control.state cimport EVENT_ABORT, EVENT_CLOSED, EVENT_SIGNAL, EVENT_STALL
from engine_ext.control.table cimport table_close, table_open
from engine_ext.control.turns cimport turns_enter, turns_hand, turns_leave, turns_want
from engine_ext.coordinator.coordinator cimport coordinator_close, coordinator_open
from engine_ext.coordinator.frozen cimport longest_hold
from engine_ext.data.executor cimport executor_close, executor_open
from engine_ext.gpu.device cimport device, device_queue
from engine_ext.hosts.connections cimport Network, connections_close, connections_forked, connections_open, connections_watch
from engine_ext.hosts.network cimport network_leave, network_start
from engine_ext.kernels.kernels cimport engine_kernels_get
from engine_ext.platform.atomics cimport (
    add32, load32_acquire, load_acquire, load_pointer, load_relaxed, now_ns, store32_release, store_pointer,
)
from engine_ext.platform.clock cimport age_ns, patience_at, patience_look, seconds_ns
from engine_ext.platform.posix cimport (
    MADV_WIPEONFORK, MAP_ANONYMOUS, MAP_FAILED, MAP_PRIVATE, PAGE, PROT_READ, PROT_WRITE, close as close_descriptor, madvise,
    mmap, munmap, pthread_mutex_destroy, pthread_mutex_init,
)
from engine_ext.setup cimport kernel_level
from engine_ext.shared.counters cimport counters_end, counters_unmap
from engine_ext.shared.layout cimport (
    CAUSE_RAISED, CAUSE_STALLED, COORDINATOR, KIND_ALLREDUCE, KIND_REDUCESCATTER, MAX_RANKS, MAX_SOCKETS, Status, engine_knobs,
    segment_bytes,
)
from engine_ext.shared.segment cimport (
    GROUP_NAME_BYTES, Segment, abort_world, segment_append, segment_enter, segment_leave, segment_map, segment_unmap, wake_others,
)
from engine_ext.snapshots cimport (
    clock_of, counters_of, definitions_of, expect_summing, history_of, knobs_with, late_steps_of, overdue_of,
    pending_of, ranks_of, read_knobs_in_force, set_knobs, steps_of, unfinished_of,
)
from engine_ext.transport.arena cimport Arena, arena_close, arena_forked, arena_open, arena_populate_share
from engine_ext.transport.carrier cimport (
    ENGINE_CARRIER_CAPSULE, ENGINE_CARRIER_DONE, ENGINE_CARRIER_VERSION, engine_carrier, engine_carrier_provider,
)
from engine_ext.transport.lanes cimport lanes_messages, lanes_open, lanes_use
from engine_ext.transport.shm cimport shared_memory_open
from engine_ext.transport.transport cimport Transport

from array import array
from os import fstat, strerror

from engine_ext.errors import EngineError, IncompatibleRanksError

cdef uint64_t NO_CHANNEL = <uint64_t>-1      # channel of a process set that uses no carrier
cdef str CLAIMED_FOR_OTHERS = (
    "the process set of the ranks {numbers} cannot be entered at {offset}, which was claimed for another set: do all its ranks "
    "form the same sets in the same order?"
)

cdef extern from *:
    """
    #ifdef Py_GIL_DISABLED
    #define ENGINE_ONE_GENERATION 1
    #else
    #define ENGINE_ONE_GENERATION 0
    #endif
    """
    bint ONE_GENERATION "ENGINE_ONE_GENERATION"     # of garbage, as the callbacks of its collector tell: a free-threaded Python

cdef extern from "<sys/eventfd.h>" nogil:
    enum: EFD_CLOEXEC, EFD_NONBLOCK
    int eventfd(unsigned int initial, int flags)


cdef const int* number_hosts(hosts, tuple numbers, int* host_of) except? NULL:
    """Write the host of each of `numbers` into `host_of`, counted from 0 in order of appearance, and return it; NULL: one
    host."""
    cdef dict counted = {}
    cdef int r
    if hosts is None:
        return NULL
    for r in range(len(numbers)):
        host_of[r] = counted.setdefault(hosts[numbers[r]], len(counted))
    return host_of


cdef int close_untaken(Engine engine, dict lanes, dict trunks) except -1:
    """Close the connections given to an engine that failed before it took them over."""
    if engine is None or engine.state.network == NULL:
        for descriptors in (lanes or {}).values():
            for descriptor in descriptors:
                close_descriptor(descriptor)
        for descriptor in (trunks or {}).values():
            close_descriptor(descriptor)
    return 0


@cython.no_gc_clear                  # __dealloc__ needs the world
cdef class Engine:
    """One rank's engine, in the world or in a process set."""

    def __cinit__(self, *args, **kwargs):
        self.state = <State*>calloc(1, sizeof(State))
        if self.state == NULL:
            raise MemoryError("no memory for the engine")
        self.state.alive = <uint64_t*>mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
        if <void*>self.state.alive == MAP_FAILED:
            self.state.alive = NULL
            raise MemoryError("no memory for the engine")
        madvise(self.state.alive, PAGE, MADV_WIPEONFORK)
        self.state.alive[0] = 1
        self.state.world = self.state
        self.state.events_fd = self.state.arena.fd = self.control = -1
        self.shared, self.group_names = [], []

    def __init__(self, int rank, int size, int control, int arena, peers, *, dict knobs, stall_warning, stall_limit, spin_us,
                 int counters=-1, double yield_us=0.0, int calls=0, hosts=None, lanes=None, trunks=None,
                 double host_silence=4.0, carrier=None, device_sums="nccl", bint another_follows=False):
        cdef State* e = self.state
        cdef int r
        if e.segment.header != NULL:
            raise EngineError("an engine is initialised once")
        self.control = control
        e.another_follows = another_follows
        arena_open(&e.arena, arena, rank, size)
        self.settings = {
            "knobs": knobs, "stall_warning": stall_warning, "stall_limit": stall_limit, "spin_us": spin_us, "yield_us": yield_us,
            "counters": counters, "hosts": hosts, "lanes": lanes, "trunks": trunks, "host_silence": host_silence,
            "carrier": carrier, "channel": 0, "device_sums": device_sums,
        }
        try:
            self.size = <int>len(peers)         # before anything is refused: these are closed with the engine
            e.peers = <int*>calloc(max(self.size, 1), sizeof(int))
            for r in range(self.size if e.peers != NULL else 0):
                e.peers[r] = peers[r]
            if size > MAX_RANKS:
                raise EngineError(f"a world has at most {MAX_RANKS} ranks, not {size}")
            if self.size != size:
                raise ValueError(f"{size} ranks have {size} pidfds, not {self.size}")
            e.events_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)
            if e.peers == NULL or e.events_fd < 0:
                raise MemoryError("no memory for the engine")
            self.open(rank, tuple(range(size)), None, 0, calls)
        except BaseException:
            close_untaken(self, lanes, trunks)
            raise

    cdef int open(self, int rank, tuple numbers, Engine world, uint64_t offset, int calls) except -1:
        """Start this rank's engine among `numbers`, in the segment at `offset` of the world's file. Native calls find it by the
        number `calls`."""
        cdef State* e = self.state
        cdef list failures = []
        self.rank, self.size, self.numbers, self.number, self.offset = rank, <int>len(numbers), numbers, numbers[rank], offset
        self.apply_settings(world)
        pthread_mutex_init(&e.lock, NULL)
        self.map_segment(world)
        if world is None:
            e.clock = &e.own_clock
            stall_open(e)
        else:
            e.clock = world.state.clock
            self.enter_segment(world)
        self.open_tables(self.open_transport(failures))
        observers_open(e, self.page if world is None else world.state.counters_page)
        self.start_threads()
        calls_admit(e, calls)
        if failures:
            if world is None:
                self.abort(f"its carrier (the setting lanes) cannot be opened: {type(failures[0]).__name__}: {failures[0]}")
            self.close(0.0)
            raise failures[0]
        return 0

    cdef int apply_settings(self, Engine world) except -1:
        """Take over the settings that need neither a segment nor other ranks."""
        cdef State* e = self.state
        cdef engine_knobs knobs
        if world is None and self.settings["counters"] >= 0:
            self.page = map_page(self.settings["counters"])
        memset(&knobs, 0, sizeof(engine_knobs))
        e.wanted = e.knobs = knobs_with(knobs, self.settings["knobs"])
        e.fusion_threshold = e.knobs.fusion_threshold
        e.spin_ns = <uint64_t>(<double>self.settings["spin_us"] * 1e3)
        e.yield_ns = <uint64_t>(<double>self.settings["yield_us"] * 1e3)
        e.stall_warning_ns = seconds_ns(self.settings["stall_warning"])
        e.stall_limit_ns = seconds_ns(self.settings["stall_limit"])
        e.ends_alone = world is not None and self.settings.get("ends_alone", False)
        return 0

    cdef int map_segment(self, Engine world) except -1:
        """Map this engine's segment."""
        cdef int[MAX_RANKS] host_of
        cdef int status = segment_map(&self.state.segment, self.control if world is None else world.control, self.offset,
                                      self.rank, self.size, number_hosts(self.settings["hosts"], self.numbers, host_of))
        if status == -EPROTO and world is None:
            raise IncompatibleRanksError(f"rank {self.rank} was given a control segment of another layout than this build's")
        if status == -EPROTO:
            raise EngineError(CLAIMED_FOR_OTHERS.format(numbers=list(self.numbers), offset=self.offset))
        if status < 0:
            raise OSError(-status, "cannot map the control segment")
        return 0

    cdef int enter_segment(self, Engine world) except -1:
        """Enter the segment of a process set of `world`."""
        cdef State* e = self.state
        cdef int[MAX_RANKS] members
        cdef int status, r
        for r in range(self.size):
            members[r] = self.numbers[r]
        self.world, e.world = world, world.state
        status = segment_enter(&e.segment, &world.state.segment, members)
        if status < 0:
            segment_unmap(&e.segment)       # the words here are those of another engine
        if status == -EPROTO:
            raise EngineError(CLAIMED_FOR_OTHERS.format(numbers=list(self.numbers), offset=self.offset))
        if status < 0:
            raise EngineError(f"rank {self.number} has entered the process set of the ranks {list(self.numbers)} before: claim a "
                              "place for each, also for those of the same ranks")
        return 0

    cdef Transport* open_transport(self, list failures) except? NULL:
        """Open the transport: shared memory, or the same with lanes to other hosts. Put the error of a carrier that cannot be
        opened into `failures`: the other ranks learn of it over connections that work."""
        cdef State* e = self.state
        cdef Transport* transport
        if e.segment.hosts == 1:
            return shared_memory_open(&e.transport, &e.segment)
        self.connect()
        transport = lanes_open(&e.network.lanes, &e.segment, e.network.to, e.network.of, e.network.bell)
        try:
            if self.settings["carrier"] is not None:
                self.use_carrier()
        except BaseException as error:
            failures.append(error)
        else:
            expect_summing(e, &e.knobs)
        return transport

    cdef int open_tables(self, Transport* transport) except -1:
        """Open the table of names, the executor, and on rank 0 the coordinator."""
        cdef State* e = self.state
        cdef bint coordinates = self.rank == COORDINATOR
        if (table_open(&e.table, &e.segment, e.clock) != Status.OK
                or executor_open(&e.executor, self.rank, &e.segment.crews, transport, &e.arena,
                                 engine_kernels_get(kernel_level()), e.clock) != Status.OK
                or (coordinates and coordinator_open(&e.coordinator, &e.segment, e.clock, &e.knobs) != Status.OK)):
            raise MemoryError("no memory for the engine's tables")
        e.coordinator.freezes = coordinates and self.size > 1 and self.settings["device_sums"] == "nccl"
        e.coordinator.hold_ns = longest_hold(e.stall_warning_ns, e.stall_limit_ns)
        return 0

    cdef int start_threads(self) except -1:
        """Start the network thread if there are other hosts, and have the engine thread drive this engine."""
        cdef State* e = self.state
        cdef int status = network_start(e.network) if e.network != NULL else 0
        if status:
            raise OSError(status, "cannot start the network thread")
        status = engines_enter(e)
        if status:
            raise OSError(status, "cannot start the engine thread")
        return 0

    cdef int connect(self) except -1:
        """Take over the connections to other hosts."""
        cdef State* e = self.state
        cdef int[MAX_RANKS * MAX_SOCKETS] lanes
        cdef int[MAX_RANKS] trunks
        cdef dict given = self.settings["lanes"], led = self.settings["trunks"]
        cdef int sockets = -1, r, k
        if given and led is not None:
            sockets = <int>len(next(iter(given.values())))
        if not 1 <= sockets <= MAX_SOCKETS or any(len(each) != sockets for each in given.values()):
            raise ValueError(f"rank {self.number} has no connections to the other hosts, or not equally many to each rank")
        for r in range(self.size):
            trunks[r] = led.get(r, -1)
            for k in range(sockets):
                lanes[r * sockets + k] = given[r][k] if r in given else -1
        e.network = <Network*>calloc(1, sizeof(Network))
        if e.network == NULL or connections_open(e.network, &e.segment, lanes, sockets, trunks) != Status.OK:
            raise MemoryError("no memory for the connections to other hosts")
        e.network.world, e.network.knobs = e.world.network, &e.knobs
        connections_watch(e.network, <uint32_t>(<double>self.settings["host_silence"] * 1e3))
        return 0

    cdef int use_carrier(self) except -1:
        """Send large messages over a carrier, in a channel of this engine's own. A process set without a channel uses connections
        alone, on all its ranks."""
        cdef object capsule = self.settings["carrier"]
        cdef Segment* segment = &self.state.segment
        cdef engine_carrier_provider* provider
        cdef engine_carrier* carrier
        cdef uint64_t channel = self.settings["channel"]
        if not PyCapsule_IsValid(capsule, ENGINE_CARRIER_CAPSULE):
            raise TypeError(f"a carrier is handed over in a capsule that is called {ENGINE_CARRIER_CAPSULE.decode()!r} "
                            f"(engine_ext/transport/carrier.h), not in {capsule!r}")
        provider = <engine_carrier_provider*>PyCapsule_GetPointer(capsule, ENGINE_CARRIER_CAPSULE)
        if provider.version != ENGINE_CARRIER_VERSION:
            raise EngineError(f"the carrier was built for version {provider.version} of engine_ext/transport/carrier.h, and this "
                              f"engine has version {ENGINE_CARRIER_VERSION}: build the carrier anew")
        if provider.channels == 0 or provider.open == NULL:
            raise EngineError("the carrier has no channel for the world: its provider has `channels` 0, or no `open`")
        if channel >= provider.channels:
            return 0
        carrier = provider.open(provider, <uint32_t>channel, segment.header, segment_bytes(<uint32_t>self.size))
        if carrier == NULL:
            raise MemoryError(f"the carrier has no memory for its channel {channel}")
        if (carrier.send == NULL or carrier.receive == NULL or carrier.progress == NULL or carrier.close == NULL
                or (carrier.sum == NULL) != (carrier.sum_memory == NULL) or (carrier.sum == NULL) != (carrier.summed == NULL)):
            self.hold_carrier(carrier.close == NULL or carrier.close(carrier) == ENGINE_CARRIER_DONE)
            raise EngineError("the carrier lacks a function: it has send, receive, progress and close, and all three of "
                              "sum_memory, sum and summed or none")
        if not lanes_use(&self.state.network.lanes, carrier):
            raise MemoryError("no memory for the messages of a carrier")
        self.carried = (provider.channels, carrier.sum != NULL)
        return 0

    cdef void hold_carrier(self, bint over):
        """Unless a carrier is `over`, keep it, and the memory that it may still write to, until the process ends."""
        if not over and not self.stays_mapped and self.settings is not None:
            self.stays_mapped = True
            Py_INCREF(self.settings["carrier"])

    @property
    def opener(self):
        """The function that opens a GPU by its number, or None."""
        return self.opening

    @opener.setter
    def opener(self, function):
        self.opening = function
        self.state.opener = NULL if function is None else <void*>function

    def use(self, cuda_thread):
        """Use the GPU of an open CUDA thread; in a process set, use the connection of its ranks on it."""
        if self.world is None:
            self.cuda_thread = cuda_thread
            use_device(self.state, <device*><size_t>cuda_thread.device)
        self.state.opened = True

    def hold(self, bint on):
        """Call the opener for every tensor on a GPU that is submitted, even if the GPU is open; or stop that."""
        self.state.calls_opener = on

    def take_turns(self, uintptr_t queue):
        """Give a process set's device_queue, by its address, turns on the GPU; 0: remove the set's queue."""
        cdef State* e = self.state
        if e.queue != NULL:
            turns_leave(e.world, e.queue)
        e.queue = <device_queue*>queue
        if e.queue != NULL:
            turns_enter(e.world, e.queue)

    def want_turn(self):
        """Count an item that moves nothing and was given to the CUDA thread; the set's coordinator also asks for its turn."""
        cdef State* e = self.state
        with nogil:
            turns_hand(e.world, e.queue)
            if e.segment.rank == COORDINATOR:
                turns_want(e.world, e.queue)

    def serve_allocations(self):
        """Allocate results on the GPU until `stop_allocations` is called; for a thread of its own."""
        serve_allocations(self.state)

    def stop_allocations(self):
        """Make `serve_allocations` return."""
        stop_allocations(self.state)

    def free_deferred(self):
        """Free finished operations that nobody holds, except those that the device still uses."""
        free_deferred(self.state)

    def count(self, bint on):
        """Switch counting into the page of counters on or off, for benchmarks."""
        expect_open(self.state)
        observers_count(self.state, self.page if on else NULL)

    def count_as(self, str name not None):
        """Count a process set's operations under a name too."""
        cdef bytes text = name.encode("utf-8", "replace")
        if self.state.alive[0] == 1 and not self.state.closed:      # a forked child has no page
            observers_name_group(self.state, text, <uint64_t>len(text))

    def tell(self, **fields):
        """Set fields of the page of counters."""
        set_fields(self.page, fields)

    def clock(self):
        """Return by how many nanoseconds rank 0's clock is ahead of this host's, and the error of that; None if unknown."""
        cdef State* e = self.state
        return None if e.segment.header == NULL or e.alive[0] != 1 else clock_of(e.segment.world)

    def form(self, tuple numbers, int calls, dict lanes=None, dict trunks=None):
        """Make an engine for some ranks of the world; return it, or None on the other ranks. Collective over the world.

        Native calls find it by the number `calls`. If its ranks are on several hosts, it is given connections like the world.
        """
        cdef Segment* segment = &self.state.segment
        cdef Handle handle
        cdef list said = [len(numbers), 0]
        cdef object failure = None
        try:
            self.expect_world()
            self.formed += 1
            # The leader of each host makes the segment before it announces the offset, so every member finds the segment.
            if segment.rank == segment.leader:
                try:
                    said[1] = self.claim(len(numbers))
                except OSError as error:
                    failure = error
            handle = self.allgather(array("Q", said), f"engine.form.{self.formed}", True)
            handle.wait()
            told = handle.gathered[0].cast("B").cast("Q").tolist()
            if len(set(told[::2])) > 1:
                raise EngineError(f"the ranks form process sets of different sizes: {told[::2]}")
            if told[2 * segment.leader + 1] == 0:       # 0 is the world's own segment
                raise failure or EngineError(f"rank {segment.leader} cannot make its control segment on this host")
            if self.rank not in numbers:
                return None
        except BaseException:
            close_untaken(None, lanes, trunks)
            raise
        return self.enter_set(numbers, calls, told[2 * segment.leader + 1], lanes, trunks, self.formed)

    def claim(self, Py_ssize_t size):
        """Make the control segment of a process set of `size` ranks; return where it begins in this host's file."""
        cdef uint64_t offset = 0
        cdef int status
        self.expect_world()
        if not 1 <= size <= self.size:
            raise ValueError(f"a process set has 1 to {self.size} ranks, not {size}")
        status = segment_append(&self.state.segment, self.control, <int>size, &offset)
        if status < 0:
            raise OSError(-status, f"cannot make the control segment of a process set of {size} ranks: {strerror(-status)}. "
                                   "Remove sets or groups that are no longer used, or give the job more memory")
        return offset

    def enter_set(self, tuple numbers, int calls, uint64_t offset, dict lanes=None, dict trunks=None,
                  uint64_t channel=NO_CHANNEL, dict settings=None):
        """Make this rank's engine in a process set, whose segment one of its ranks on each host has claimed at `offset`.

        Not collective: its ranks may enter one after another, and use it at once. `channel`: the carrier's, equal on all ranks.
        `settings`: those that differ from the world's.
        """
        cdef Engine part = None
        cdef uint64_t room
        try:
            self.expect_world()
            if self.rank not in numbers or len({*numbers, *range(self.size)}) > self.size or len(set(numbers)) < len(numbers):
                raise ValueError(f"a process set has ranks of the world, 0 to {self.size - 1}, each once and this one, "
                                 f"{self.rank}, among them, not {list(numbers)}")
            room = fstat(self.control).st_size
            if offset % PAGE or offset > room or room - offset < segment_bytes(<uint32_t>len(numbers)):
                raise ValueError(f"no process set of {len(numbers)} ranks was claimed at {offset} on this host")
            part = Engine.__new__(Engine)
            part.settings = {**self.settings, "lanes": lanes, "trunks": trunks, "channel": channel, **(settings or {})}
            part.open(numbers.index(self.rank), numbers, self, offset, calls)
        except BaseException:
            close_untaken(part, lanes, trunks)
            raise
        return part

    cdef int expect_world(self) except -1:
        """Raise unless this is the world's engine, and open."""
        expect_open(self.state)
        if self.world is not None:
            raise EngineError("process sets are formed by the world's engine")
        return 0

    def __dealloc__(self):
        cdef State* e = self.state
        cdef bint over, alive
        cdef int r
        if e == NULL:
            return
        alive = e.alive != NULL and e.alive[0] == 1
        if alive:                   # in a forked child all of this is the parent's
            if not self.state.closed and e.segment.header != NULL:
                calls_dismiss(e)
                engines_leave(e)
                if not calls_settle(e, TICK_NS):
                    return          # a thread is inside: it keeps the memory that it uses
            if (e.device != NULL and load_acquire(&e.device.passed) != <uint64_t>-1) or e.handed != e.returned:
                return              # likewise the CUDA thread, if it was not closed or holds items of this engine
            arena_close(&e.arena)
            if e.network != NULL:
                with nogil:                 # a carrier at work may need it
                    over = connections_close(e.network)
                self.hold_carrier(over)
                free(e.network)
            if e.segment.header != NULL:
                table_close(&e.table)
                executor_close(&e.executor)
                coordinator_close(&e.coordinator)
                pthread_mutex_destroy(&e.lock)
            if not self.stays_mapped:
                segment_unmap(&e.segment)
            for r in range(self.size if e.peers != NULL else 0):
                if e.peers[r] != -1:
                    close_descriptor(e.peers[r] if e.peers[r] >= 0 else -2 - e.peers[r])
            for descriptor in (e.events_fd, self.control):
                if descriptor >= 0:
                    close_descriptor(descriptor)
            if self.world is None:
                counters_unmap(self.page)
            munmap(e.alive, PAGE)
        free(e.peers)
        free(e.batch)
        free(e.member_shapes)
        free(e.sizes)
        observers_close(e, alive)
        free(e)
        self.state = NULL

    @property
    def group_name(self):
        """The name of a process set in reports; empty: it has none."""
        return self.group_names[len(self.group_names) - 1].decode() if self.group_names else ""

    @group_name.setter
    def group_name(self, str name not None):
        cdef bytes text = name.encode("utf-8", "replace")[:GROUP_NAME_BYTES].decode("utf-8", "ignore").encode()
        if name == self.group_name:
            return
        self.group_names.append(text)
        # Pairs with the load in group_name() of shared/segment.
        store_pointer(<void**>&self.state.segment.group_name, <void*><char*>text if text else NULL)

    @property
    def failure(self):
        """The exception of the world's failure, or None."""
        cdef State* e = self.state
        if e.segment.header == NULL or e.alive[0] != 1 or load_acquire(e.segment.abort) == 0:
            return None
        return world_error(e)

    cdef Handle start(self, Op* op, object name, bint blocking, object output):
        """Submit an operation under `name`, or unnamed if it is None; return its handle. With `blocking`, wait up to a tick for
        it."""
        return begin_op(self, self.state, op, name, blocking, output)

    cdef int agree_on_size(self, str name, uint64_t size) except -1:
        """Wait until every rank has come here, and check that all pass the same size."""
        self.start(size_barrier_op(size), name, True, None).wait()
        return 0

    # ---- collectives

    def allreduce(self, tensor, output, name, int op, double prescale, double postscale, bint blocking=False, wire=None):
        expect_open(self.state)
        return self.start(allreduce_op(self.state, tensor, output, op, prescale, postscale, wire), name, blocking, output)

    def allreduce_directly(self, tensor, name, int op, prescale, postscale):
        """Try to allreduce in place without a handle; return whether that was done."""
        expect_open(self.state)
        return reduce_directly(self, self.state, tensor, name, op, prescale, postscale)

    def count_prepared(self):
        """Return the number of a new prepared allreduce without a name, from 1."""
        self.prepared += 1
        return self.prepared

    def allreduce_group(self, list tensors, list outputs, name, int op, double prescale, double postscale, bint blocking=False,
                        wire=None):
        cdef State* e = self.state
        expect_open(e)
        return self.start(reduce_group_op(e, KIND_ALLREDUCE, tensors, outputs, op, prescale, postscale, wire), name, blocking,
                          outputs)

    def reducescatter(self, tensor, output, name, int op, double prescale, double postscale, bint blocking=False, wire=None):
        expect_open(self.state)
        return self.start(reducescatter_op(self.state, tensor, output, op, prescale, postscale, wire), name, blocking, output)

    def reducescatter_group(self, list tensors, list outputs, name, int op, double prescale, double postscale,
                            bint blocking=False, wire=None):
        cdef State* e = self.state
        expect_open(e)
        return self.start(reduce_group_op(e, KIND_REDUCESCATTER, tensors, outputs, op, prescale, postscale, wire), name,
                          blocking, outputs)

    def broadcast(self, tensor, output, name, Py_ssize_t root, bint blocking=False):
        expect_open(self.state)
        return self.start(broadcast_op(self.state, tensor, output, root), name, blocking, output)

    def allgather(self, tensor, name, bint blocking=False, room=None, output=None):
        expect_open(self.state)
        return self.start(allgather_op(self.state, tensor, room, output), name, blocking, output)

    def send_bytes(self, tensor, str name, bint copy):
        """Send the bytes of a tensor under a name; see `send_op`."""
        expect_open(self.state)
        return begin_in_turn(self, self.state, send_op(tensor, copy), name)

    def receive_bytes(self, output, str name):
        """Receive bytes that were sent under a name; see `receive_op`."""
        expect_open(self.state)
        return begin_in_turn(self, self.state, receive_op(output), name)

    def allgather_group(self, list tensors, name, bint blocking=False, sparse=None, room=None):
        expect_open(self.state)
        return self.start(allgather_group_op(self.state, tensors, sparse, room), name, blocking, None)

    def alltoall(self, tensor, splits, name, bint blocking=False, room=None, output=None):
        expect_open(self.state)
        return self.start(alltoall_op(self.state, tensor, splits, room, output), name, blocking, output)

    def meet(self, name=None):
        """Wait in a barrier, without a handle."""
        expect_open(self.state)
        meet_directly(self, self.state, name)

    def barrier(self, name, bint blocking=False):
        expect_open(self.state)
        return self.start(barrier_op(self.state, name, blocking), name, blocking, None)

    def fail(self, str kind, name, str reason):
        """Announce that a call of this rank has failed, in place of the operation that it would have submitted. So every rank
        learns of it at that operation, and the numbers of unnamed operations stay in step."""
        if self.state.alive != NULL and self.state.alive[0] == 1 and not self.state.closed:
            fail_call(self.state, kind, name, reason)

    def join(self):
        """Submit nothing until every rank has called this; return the last rank that did. Collective."""
        expect_open(self.state)
        wait_for_joins(self.state)
        return self.state.last_joined

    @property
    def joined(self):
        """True while this rank has joined and not all ranks have."""
        return self.state.joined

    @property
    def joins(self):
        """Number of times that all ranks have joined."""
        return load32_acquire(&self.state.segment.joins)

    def share(self, uint64_t nbytes):
        """Return zeroed memory of `nbytes`, at the same offset in every rank's part of the arena. Collective."""
        cdef Arena* arena = &self.state.arena
        cdef Part part
        cdef str name
        cdef int region
        expect_open(self.state)
        if self.world is not None:
            raise EngineError("tensors are shared by all ranks of the world, not by a process set")
        if nbytes == 0:
            raise ValueError("a shared region has at least one byte")
        # The leader of each host extends the file before it submits the barrier, so every rank finds it long enough afterwards.
        if self.state.segment.rank == self.state.segment.leader:
            grow_arena(arena, nbytes)
        self.regions += 1
        name = f"engine.share.{self.regions}"
        self.agree_on_size(name, nbytes)
        region = map_region(arena, nbytes)
        self.agree_on_size(name, nbytes)
        with nogil:
            arena_populate_share(arena, region)
        part = part_of(arena, region, nbytes)
        self.shared.append(part)
        return memoryview(part)

    # ---- knobs and snapshots

    def set_knobs(self, **changes):
        expect_open(self.state)
        return set_knobs(self.state, changes)

    def knobs(self):
        return read_knobs_in_force(self.state)

    @property
    def compressible(self):
        """True if a defined tensor follows the knob `compression`; on the coordinator only."""
        return load_relaxed(&self.state.coordinator.tuned) != 0

    @property
    def codable(self):
        """True if a defined tensor follows that knob, fp8 included; on the coordinator only."""
        return load_relaxed(&self.state.coordinator.tuned_coded) != 0

    @property
    def sockets_per_lane(self):
        """Connections opened between two ranks on different hosts; 0 with one host."""
        cdef Network* network = self.state.network
        return network.list[0].count if network != NULL and network.list != NULL else 0

    @property
    def messages(self):
        """Number of messages that this rank has given to a carrier."""
        return lanes_messages(&self.state.network.lanes) if self.state.network != NULL else 0

    @property
    def carrier(self):
        """Number of channels of the open carrier, and whether it can sum; None without a carrier."""
        return self.carried

    @property
    def chainable(self):
        """True if ranks are on several hosts, and sums that pass from host to host have the bits of all other ways."""
        return self.state.segment.hosts > 1 and self.state.segment.crews.consecutive

    def counters(self):
        return counters_of(self.state)

    def history(self):
        return history_of(self.state)

    def pending(self):
        return pending_of(self.state)

    def unfinished(self):
        return unfinished_of(self.state)

    @property
    def idle(self):
        """True if this rank has nothing in flight, apart from operations that are set aside."""
        cdef State* e = self.state
        return (e.segment.header == NULL or e.alive[0] != 1 or load_pointer(<void**>&e.table.inflight) == NULL
                or all_are_aside(e))

    def ranks(self):
        """Return the progress of every rank."""
        return ranks_of(self.state)

    def overdue(self):
        """Return and clear the lines for a stall report."""
        return overdue_of(self.state)

    def mark_step(self, int number=0, bint judged=True):
        mark_step(self.state, number, judged)

    def begin_input(self):
        """Note that the calling thread begins to get a batch. Calls may be nested."""
        note_input(self.state, True)

    def end_input(self):
        """Note that the calling thread has got a batch."""
        note_input(self.state, False)

    def note_collection(self, str phase, dict about):
        """Note a collection of the cyclic garbage collector; a callback for `gc.callbacks`. The youngest generation is left
        out: it is collected often, and too small to delay a step. A free-threaded Python calls every collection that one."""
        if ONE_GENERATION or about["generation"] != 0:
            note_collection(self.state, phase == "start")

    def late_steps(self):
        """Return the last late steps of the process, at most 256, oldest first."""
        return late_steps_of(self.state)

    def record_steps(self):
        record_steps(self.state)

    def steps(self, uint64_t since):
        """Return the marks of steps from number `since` on."""
        return steps_of(self.state, since)

    def definitions(self):
        """Return the names to which the coordinator has given an id."""
        return definitions_of(self.state)

    def mark_traffic(self, str name=None, uint32_t every=1, uint32_t window=0):
        mark_traffic(self.state, name, every, window)

    # ---- failure and shutdown

    def forked(self):
        """Detach a forked child, which must call this at once; elsewhere do nothing.

        Its view of shared tensors becomes its own. What is the parent's is closed, because a child that outlives the world must
        not hold its files.
        """
        cdef State* e = self.state
        cdef int r
        if e.alive == NULL or e.alive[0] == 1:
            return
        arena_forked(&e.arena)
        self.hold_carrier(False)        # it is the parent's: its end must not run here
        if e.network != NULL:
            connections_forked(e.network)
        for r in range(self.size if e.peers != NULL else 0):
            if e.peers[r] != -1:
                close_descriptor(e.peers[r] if e.peers[r] >= 0 else -2 - e.peers[r])
                e.peers[r] = -1
        for descriptor in (e.events_fd, self.control, e.arena.fd):
            if descriptor >= 0:
                close_descriptor(descriptor)
        e.events_fd = self.control = e.arena.fd = -1
        observers_forked(e)

    def monitor(self):
        """Block until an event needs attention; return `abort`, `stall`, `signal` or `closed`."""
        cdef int events
        if self.state.alive[0] != 1:
            return "closed"
        with nogil:
            events = monitor_wait(self.state)
        if events & EVENT_CLOSED:
            return "closed"
        # One event at a time, the gravest first; the others come with the next call.
        for event, name in ((EVENT_ABORT, "abort"), (EVENT_STALL, "stall"), (EVENT_SIGNAL, "signal")):
            if events & event:
                if events & ~event:
                    raise_event(self.state, events & ~event)
                return name
        return "closed"

    def starting(self):
        """Announce that this rank has started; return the ranks of this host that have not."""
        cdef Segment* segment = &self.state.segment
        expect_open(self.state)
        store32_release(&segment.mine.started, 1)       # pairs with the acquire of the others
        return [segment.crew[i] for i in range(segment.crew_size) if not load32_acquire(&segment.pages[segment.crew[i]].started)]

    def notify_signal(self):
        """Make `monitor` return `signal`; may be called on any thread."""
        if self.state.alive[0] == 1 and not self.state.closed:
            raise_event(self.state, EVENT_SIGNAL)

    def abort(self, str reason):
        """Make the world fail, with this rank as the culprit."""
        cdef bytes text
        if self.state.alive[0] == 1 and not self.state.closed:
            text = reason.encode("utf-8", "replace")
            abort_world(&self.state.segment, self.rank, CAUSE_RAISED, text)

    def accuse(self, int rank, str reason):
        """Make the world fail because `rank` stands still."""
        cdef bytes text
        if self.state.alive[0] == 1 and not self.state.closed:
            text = reason.encode("utf-8", "replace")
            abort_world(&self.state.segment, rank, CAUSE_STALLED, text)

    def close(self, double timeout):
        """Finish what is in flight, for at most `timeout` seconds, announce that this rank left, and stop the engine."""
        cdef State* e = self.state
        cdef Goal goal
        cdef uint64_t begun, limit
        cdef bint settled, over = True
        cdef int status
        if self.state.closed or e.alive == NULL or e.alive[0] != 1 or e.segment.header == NULL:
            return
        memset(&goal, 0, sizeof(Goal))
        goal.idle = True
        begun, limit = patience_at(e.clock, now_ns()), seconds_ns(timeout)
        with nogil:                     # here and below: a thread with the lock may wait for the GIL
            driver_wait_for_all(e, True)
        try:
            while True:
                status = Status.OK
                with nogil:
                    if age_ns(patience_look(e.clock), begun) < limit and not all_are_aside(e):
                        status = driver_wait(e, &goal, TICK_NS)
                if status == Status.OK:
                    break
                PyErr_CheckSignals()
        finally:
            with nogil:
                driver_wait_for_all(e, False)
                claim_outwait(e)
            self.state.closed = True
            if e.network != NULL:
                store32_release(&e.network.closed, 1)       # pairs with has_closed, on the network thread
            with nogil:
                calls_dismiss(e)
                engines_leave(e)
                settled = calls_settle(e, limit)
                settled = finish_device(e, limit) and settled
            if not settled:
                Py_INCREF(self)         # a thread is inside: it keeps the memory that it uses
            if self.rank == COORDINATOR:
                store32_release(&e.segment.coordinator.over, 1)
            # After the last chunk that this rank passes; pairs with the acquire of ranks that need this one, and of monitors.
            store32_release(&e.segment.mine.left, 1)
            add32(&e.segment.header.departures, 1)      # pairs with stall_look_for_left
            wake_others(&e.segment, 0)
            with nogil:
                network_leave(e.network, limit)
                if e.network != NULL and settled:
                    over = connections_close(e.network)
            self.hold_carrier(over)
            self.settings["carrier"] = None     # a child forked later must not end the parent's carrier
            for part in self.shared:
                (<Part>part).detached = True
            arena_close(&e.arena)
            self.shared = []
            if self.world is not None:
                observers_leave_group(e)
            else:
                counters_end(e.counters_page)
                raise_event(e, EVENT_CLOSED)
                close_descriptor(self.control)
                self.control = -1
            if self.world is not None and settled and over and self.world.control >= 0:
                segment_leave(&e.segment, self.world.control, self.offset)
            free_deferred(e)
