"""The state of one rank's engine that is not Python's."""
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t, uint8_t

from engine_ext.control.overlap cimport Overlap
from engine_ext.control.step_clock cimport StepClock
from engine_ext.control.table cimport Table
from engine_ext.control.trace cimport Marks, Trace
from engine_ext.coordinator.coordinator cimport Coordinator
from engine_ext.data.executor cimport Executor
from engine_ext.gpu.device cimport device, device_item, device_queue
from engine_ext.hosts.connections cimport Liveness, Network, Traffic
from engine_ext.operations.op cimport Op
from engine_ext.platform.clock cimport patience
from engine_ext.platform.posix cimport pthread_mutex_t, pthread_t
from engine_ext.shared.counters cimport counters_page
from engine_ext.shared.layout cimport KINDS, MAX_RANKS, REASON_BYTES, engine_entry, engine_knobs, engine_meta, member_shape
from engine_ext.shared.segment cimport Segment
from engine_ext.transport.arena cimport Arena
from engine_ext.transport.shm cimport SharedMemory

cdef enum Role:             # who holds the driver's role: the values of State.role
    ENGINE_ASLEEP = 0       # the engine thread holds it, asleep: a waiter may take the role by compare-and-swap
    ENGINE = 1              # the engine thread holds it, in a pass
    WAITER = 2              # a thread in a blocking call holds it

cdef enum:                  # bits of State.events, which wake the monitor thread
    EVENT_ABORT = 1
    EVENT_SIGNAL = 2
    EVENT_STALL = 4
    EVENT_CLOSED = 8

cdef enum:
    HISTORY = 512           # number of schedule entries that are remembered
    HISTORY_NAME = 64       # bytes of a name in the history, with its final zero; longer names are cut
    OVERDUE_BYTES = 8192    # bytes of the text for the next stall report
    UNFINISHED = 64         # number of operations without a result that are remembered
    UNFINISHED_NAME = 192   # bytes of a name among them, with its final zero; longer names are cut

cdef struct Row:            # one schedule entry in the history; fields as in engine_entry
    uint64_t sequence
    uint8_t type
    uint8_t kind
    uint8_t algorithm
    uint8_t stores
    uint8_t wire            # WIRE_*: the dtype in which tensors travelled
    bint frozen             # whether it was a frozen batch
    uint32_t items
    uint64_t nbytes
    uint32_t knob_version
    uint64_t started        # nanoseconds, monotonic
    uint64_t ended          # nanoseconds, monotonic; 0: the entry is in progress
    char[HISTORY_NAME] name  # name of the first tensor, cut to fit, with a zero behind it

cdef struct Unfinished:     # an operation of this rank that ended without a result
    uint64_t submitted      # nanoseconds, monotonic
    uint64_t ended          # nanoseconds, monotonic
    int64_t sequence        # sequence of the entry by which it failed alone; -1: it failed with the world
    bint begun              # whether an entry with it had begun
    engine_meta meta        # what this rank submitted
    char[UNFINISHED_NAME] name  # cut to fit, with a zero behind it

cdef struct Counters:       # since the engine's start; atomics of the role's holder and of callers, read without the lock
    uint64_t entries        # schedule entries executed, of any type
    uint64_t tensors        # operations of this rank in batches
    uint64_t nbytes         # bytes of these batches
    uint64_t device_bytes   # of `nbytes`, bytes in the memory of a GPU
    uint64_t wait_ns        # nanoseconds for which callers were blocked in the engine, added up over callers
    uint64_t busy_ns        # nanoseconds from the start to the end of batches
    uint64_t sleeps         # times that a caller with the role slept on its door
    uint64_t yields         # times that a caller with the role yielded its processor
    uint64_t late           # sleeps that ended by their timeout although there was something to do: lost or very late wake-ups

cdef struct State:
    # Parts with rules of their own: `segment` is set at the start, each of its words has one writer (shared/layout.h).
    Segment segment
    # The engines of the process. `world` is set at the start; the rest is written under the world's lock.
    State* world                # of a process set: the world's engine; of the world: itself
    State* sets                 # of the world: list of the engines of its process sets; NULL: none
    State* next_set             # of a process set: the next in that list
    State* driven               # of the world: the engine that the engine thread drives now; NULL: none
    # Parts of other planes. `table` is written under the lock; `executor`, `traffic`, `coordinator` by the role's holder.
    Table table
    Arena arena
    SharedMemory transport
    Network* network            # written by the network thread, too; NULL: all ranks are on this host
    Executor executor
    Traffic traffic             # used where ranks are on several hosts
    Liveness liveness           # likewise, in the world's engine alone; written by the holder of its `busy`
    Coordinator coordinator     # used on the coordinator's rank alone
    pthread_mutex_t lock        # guards `table`, `wanted`, `history`, and all that is said to be under the lock
    # The driver's role: atomics of all threads. `stop`, `threaded` and `thread` are written as engines enter and leave.
    uint32_t role               # atomic: Role
    uint32_t waiters            # atomic: number of threads in a blocking call
    uint32_t local_door         # event count (futex) on which waiters without the role sleep
    uint32_t stop               # atomic: 1 once the engine thread has to leave this engine; set under the world's lock
    bint threaded               # of the world: whether `thread` has to be joined; under the world's lock
    pthread_t thread            # of the world: the engine thread, which also drives the process sets
    # The engine thread's last turn in this engine. Written by the engine thread alone, once it has entered the engine.
    bint moved                  # whether that turn ended with something moved
    uint32_t driven_at          # count of the engine's door when that turn began
    uint64_t due                # when the engine thread has to look again by itself: nanoseconds, monotonic; 0: never
    # The entry in progress. Written by the role's holder.
    engine_entry* entry         # points into the schedule's ring; NULL: no entry is in progress
    uint64_t entry_begun        # when this rank began its last entry: nanoseconds, monotonic
    uint64_t entry_ended        # when this rank ended its last entry: nanoseconds, monotonic
    Op** batch                  # malloc'ed: this rank's operations of the entry, in the entry's order
    int32_t batch_room          # operations for which `batch` has room
    bint sending_members        # the broadcast of `member_shapes` is under way; the operation itself follows
    member_shape* member_shapes  # malloc'ed: shapes of all tensors of the entry's groups, in order
    uint64_t member_room        # number of tensors for which `member_shapes` has room
    int64_t* sizes              # malloc'ed: sizes that ranks exchange before an entry, by rank; behind them this rank's own
    uint64_t sizes_room         # number of integers for which `sizes` has room
    # The backlog: operations of native calls that wait to be submitted. Written under the lock.
    Op* backlog                 # the oldest; read without the lock, too (is_goal_met); NULL: none
    Op* backlog_last            # the newest
    # Notes about submissions: `brought_bytes` is an atomic of all submitters, `drained` is written by the role's holder.
    uint64_t brought_bytes      # bytes that this rank has submitted since it last woke the leader
    uint64_t drained            # bytes of this rank's request ring that the coordinator had read at the last pass
    # Knobs. Written under the lock: `wanted` and `wanted_new` by the setter, the rest by the role's holder.
    engine_knobs knobs          # as stamped on the last entry that this rank executed
    uint64_t fusion_threshold   # atomic: knobs.fusion_threshold, for submitters without the lock
    uint64_t knobs_entry        # sequence of the entry that brought knobs.version into force
    engine_knobs wanted         # rank 0: knobs that the program or the tuner has set, for the coordinator
    uint32_t wanted_new         # atomic: 1 while `wanted` is not in force; the role's holder clears it
    # Join. Written under the lock, by the calling thread and by the role's holder; `joins_reported` by the waiting thread.
    bint joined                 # whether this rank has joined: it submits nothing until all have
    int last_joined             # rank that joined last in the most recent join of all
    bint joins_reported         # whether the wait for other ranks to join has been reported
    # Calls. Written by threads of the program.
    bint closed                 # whether this engine has been shut down; under the GIL
    uint64_t[KINDS] unnamed     # atomic, under the lock: by kind, number of unnamed operations that this rank has submitted
    uint64_t caller             # atomic: identifier of the first thread that called this engine; 0: none
    uint32_t many_threads       # atomic: 1 once other threads have called this engine, or may do so
    uint32_t calls_back         # of the world, atomic: 1 once threads of the engine's own call the program, and that any engine
    # Failure and the monitor. A field without the name of its writer is set at the start.
    bint another_follows        # whether the process may enter another world after this one has failed
    uint32_t failed             # atomic: 1 once this engine has failed its operations; by fail_everything, under the lock
    bint ends_alone             # of a process set: a needed rank that leaves ends this set alone, and not the world
    uint32_t parted             # atomic: 1 + the rank for which this set has ended alone; 0: it has not; by end_for_left
    uint64_t claimed_at         # by the role's holder: when it first saw an unjudged claim: nanoseconds, monotonic; 0: never
    int events_fd               # eventfd that wakes the monitor thread
    uint32_t events             # atomic: EVENT_* that the monitor thread has not taken yet; by any thread
    int* peers                  # by rank, a pidfd; -1: on another host; less: -2 - pidfd, ended; by the monitor thread
    uint64_t spin_ns            # nanoseconds that a caller spins before it sleeps; 0: it does not spin
    uint64_t yield_ns           # nanoseconds that a caller yields instead, in a small operation on shared processors; 0: none
    # Limits on progress, set at the start; times are nanoseconds that this process has seen pass (clock.h).
    patience own_clock          # the process's clock; in the world's engine
    patience* clock             # points to `own_clock` of the world's engine, also from a process set's
    uint64_t look_ns            # longest time between two looks of the monitor thread; 0: no limit has to be watched
    uint64_t stall_warning_ns   # the setting `stall_warning`; 0: never
    uint64_t stall_limit_ns     # the setting `stall_limit`; 0: never
    # Progress of the watch over those limits: `reported` by the monitor thread, the other two under the lock.
    uint64_t reported           # time of the last report, which covers all operations submitted before it
    uint64_t asked_for          # `submitted` of the operation about which rank 0 was last asked
    uint64_t asked_at           # when rank 0 was last asked
    # The GPU. Written as it is opened, under the GIL; `queues` under the world's lock.
    device* device              # of the world: the open GPU; NULL: none
    bint opened                 # whether the ranks of this engine are connected on the GPU
    device_queue* queue         # of a process set: its queue of items; NULL: the world's engine, or no communicator
    device_queue* queues        # of the world: list of the queues of this rank's process sets
    # Items of the CUDA thread. Written under the lock.
    uint64_t handed             # number of items that this engine has handed to the CUDA thread
    uint64_t returned           # number of these that the CUDA thread has ended
    uint64_t last_ticket        # ticket of the last item that was enqueued
    # Progress of the GPU at the last look. Written by the monitor thread alone.
    uint64_t device_passed      # tickets that the GPU had passed
    uint64_t device_since       # when it came so far, as this process sees time pass; 0: it had passed all
    uint64_t device_warned      # ticket about which the last warning was; 0: none
    # Room for results whose sizes were not known before. Written under the lock; `rooms_closed` is an atomic.
    device_item* unallocated       # items whose results have no room yet, oldest first; a failure empties the list
    device_item* allocating   # the item for which room is being made; NULL: none
    uint32_t allocation_door         # event count (futex) on which the thread that makes room sleeps
    uint32_t rooms_closed       # atomic: 1 once no result needs room any more
    # Objects of Python and operations to free. Written under the GIL; `deferred_free` is an atomic of all threads.
    void* opener                # a Python function of Engine that opens a GPU by its number; NULL: none
    bint calls_opener           # whether a submitter of a GPU tensor calls `opener` although the GPU is open
    void* deferred_free         # atomic: stack of operations that are done and abandoned, for a thread with the GIL to free
    Op* deferred_on_device                  # list of operations without an owner, whose tensors the GPU may still use
    # Stall reports. `overdue` is written under the lock, the rest by the role's holder.
    char[OVERDUE_BYTES] overdue  # lines for the next stall report; the monitor thread takes them
    uint32_t[MAX_RANKS] overdue_seen    # rank 0, by rank: 1 + the id in its `overdue` word at the last look; 0: none
    char[REASON_BYTES] account  # rank 0: the last report of who waits for whom, so that it is not repeated
    uint64_t stall_reported     # 1 + sequence of the last entry that was reported as stalled; 0: none
    # Set at the start.
    uint64_t* alive             # a page of its own: 1 in this process, wiped to 0 in a forked child
    # Observers (observers.pxd). Written under the lock; `counters` and `unblocked` are atomics.
    Counters counters
    Row[HISTORY] history        # the last HISTORY schedule entries: a ring
    uint64_t rows               # number of rows ever written: the last is at (rows - 1) % HISTORY
    Unfinished[UNFINISHED] unfinished   # the last operations that ended without a result: a ring
    uint64_t unfinished_rows    # number of these ever written: the last is at (unfinished_rows - 1) % UNFINISHED
    Trace trace                 # records of the timeline
    Marks marks                 # ends of steps, for the tuner; rank 0 alone
    counters_page* counters_page  # the process's page of counters; NULL: nothing is counted
    uint32_t group_place        # atomic: 1 + place of this group's counters in that page, under the world's lock; 0: none
    uint64_t unblocked          # of the world, atomic: when a caller of this process was last blocked in the engine
    Overlap overlap             # kept while there is a page of counters
    uint64_t step_begun         # likewise: end of the last step, nanoseconds; 0: no step has ended
    StepClock* step_clock       # of the world, set at the start: the parts of its steps; NULL: nothing is counted
    # Written by the monitor thread alone.
    uint32_t overdue_count      # number of operations in flight that were overdue at the last look
