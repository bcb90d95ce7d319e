"""The state of one rank's engine, outside of Python."""
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t, uint8_t

from engine_ext.control.overlap cimport Overlap
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
from engine_ext.shared.layout cimport KINDS, MAX_RANKS, REASON_BYTES, engine_entry, engine_knobs, member_shape
from engine_ext.shared.segment cimport Segment
from engine_ext.transport.arena cimport Arena
from engine_ext.transport.shm cimport SharedMemory

cdef enum Role:             # who holds the driver's role: one word
    ENGINE_ASLEEP = 0       # the engine thread, asleep on its door: a waiter may take the role by compare-and-swap
    ENGINE = 1              # the engine thread, in a pass
    WAITER = 2              # a thread in a blocking call

cdef enum:                  # bits of `events`, which wake the monitor thread
    EVENT_ABORT = 1
    EVENT_SIGNAL = 2
    EVENT_STALL = 4
    EVENT_CLOSED = 8

cdef enum:
    HISTORY = 512           # entries that are remembered
    HISTORY_NAME = 64       # bytes of a name in the history; longer ones are cut
    OVERDUE_BYTES = 8192    # bytes of the lines for the next stall report

cdef struct Row:            # one schedule entry in the history; the fields as in engine_entry
    uint64_t sequence
    uint8_t type
    uint8_t kind
    uint8_t algorithm
    uint8_t stores
    uint8_t wire            # WIRE_*: as what tensors travelled
    bint frozen             # whether it was a frozen batch
    uint32_t items
    uint64_t nbytes
    uint32_t knob_version
    uint64_t started        # nanoseconds, monotonic
    uint64_t ended          # nanoseconds, monotonic; 0: the entry is in progress
    char[HISTORY_NAME] name  # the first tensor's, not terminated if it fills the field

cdef struct Counters:       # since the engine's start, counted by whoever holds the driver's role; read without the lock
    uint64_t entries        # schedule entries executed, of any type
    uint64_t tensors        # operations of this rank that batches carried
    uint64_t nbytes         # bytes of these batches
    uint64_t device_bytes   # of these, bytes in the memory of a GPU
    uint64_t wait_ns        # nanoseconds in which callers were blocked in the engine, added up over callers
    uint64_t busy_ns        # nanoseconds from the start to the end of entries
    uint64_t sleeps         # times that a caller with the role slept on its door
    uint64_t yields         # times that a caller with the role yielded its processor
    uint64_t late           # sleeps that ended by their tick although there was something to do: lost or very late wake-ups

cdef struct State:
    Segment segment
    State* world                # of a process set: the world's engine; of the world: itself
    State* sets                 # of the world: list of its process sets' engines, under the world's lock; NULL: none
    State* next_set             # of a process set: the next in that list
    State* driven               # of the world: the engine that the engine thread drives, under the world's lock; NULL: none
    Table table
    Arena arena
    SharedMemory transport
    Network* network            # NULL: all ranks are on this host
    Executor executor
    Traffic traffic             # where ranks are on several hosts
    Liveness liveness           # likewise; the world's alone
    Coordinator coordinator     # used on the coordinator's rank alone
    pthread_mutex_t lock        # guards table, wanted knobs, history, and what says so below
    # the driver's role
    uint32_t role               # atomic: Role
    uint32_t waiters            # atomic: threads in a blocking call
    uint32_t local_door         # event count (futex) on which callers without the role sleep
    uint32_t stop               # atomic: 1 once the engine thread has to leave this engine; set under the world's lock
    bint threaded               # of the world: whether `thread` is to be joined; under its lock
    pthread_t thread            # of the world: the engine thread, which drives the process sets, too
    # the engine thread's turn here, its own
    bint moved                  # whether it moved something when it looked last
    uint32_t driven_at          # count of the engine's door when it began its last turn
    uint64_t due                # when it has to look again by itself: nanoseconds, monotonic; 0: never
    # the entry in progress, owned by whoever holds the role
    engine_entry* entry         # in the schedule's ring; NULL: none is in progress
    uint64_t entry_begun        # nanoseconds, monotonic: when this rank began its last entry
    uint64_t entry_ended        # nanoseconds, monotonic: when it was done with its last entry
    Op** batch                  # malloc'ed: this rank's operations in the entry, in its order
    int32_t batch_room          # operations for which `batch` has room
    bint sending_members        # it is broadcasting `member_shapes`; the operation itself follows
    member_shape* member_shapes  # malloc'ed: of every tensor of its groups, in order
    uint64_t member_room        # bytes of it
    int64_t* sizes              # malloc'ed: numbers that ranks exchange before an entry (size_exchange.pyx), and this rank's own
    uint64_t sizes_room         # numbers for which it has room
    Op* backlog                 # operations of native calls that wait to be submitted, oldest first; under the lock
    Op* backlog_last            # the newest of them
    uint64_t brought_bytes      # bytes that this rank has submitted since it last woke the leader
    uint64_t drained            # bytes of this rank's request ring that the coordinator had read when a waiter last looked
    engine_knobs knobs          # as stamped on the last entry that this rank executed
    uint64_t fusion_threshold   # atomic: that of `knobs`, for submissions, which read it without the lock
    uint64_t knobs_entry        # sequence of the entry with which this version came into force
    engine_knobs wanted         # rank 0: knobs that the program or the tuner has set, for the coordinator; under the lock
    uint32_t wanted_new         # atomic: 1 while `wanted` is not yet in force
    # join
    bint joined                 # whether this rank has joined: it submits nothing until all have; under the lock
    int last_joined             # the rank that joined last in the most recent of them
    bint joins_reported         # whether this wait for other ranks to join has been reported
    # calls
    bint closed                 # whether this rank's engine has been shut down; under the GIL
    uint64_t[KINDS] unnamed     # atomic, written under the lock: operations without a name that this rank has submitted, by kind
    uint64_t caller             # atomic: identifier of the first thread that called this engine; 0: none has
    uint32_t many_threads       # atomic: 1 once other threads have called it, too, or may do so
    uint32_t calls_back         # of the world: atomic: 1 once threads of the engine's own call the program, and it any engine
    # failure and the monitor
    bint another_follows        # whether the process may enter another world when this one has failed
    uint32_t failed             # atomic: 1 once the world's failure has been taken note of here
    bint ends_alone             # of a process set: a rank that leaves while others need it ends this set, and not the world
    uint32_t parted             # atomic: 1 + the rank for which this set has ended so; 0: it has not
    uint64_t claimed_at         # since when a claim of this host waits for its answer: nanoseconds, monotonic; 0: none was seen
    int events_fd               # eventfd that wakes the monitor thread
    uint32_t events             # atomic: EVENT_* that it has not taken yet
    int* peers                  # pidfds by rank; -1: it is on another host; below that: its end has been noticed
    uint64_t spin_ns            # nanoseconds that a caller spins before it sleeps
    uint64_t yield_ns           # nanoseconds that it yields instead, in a small operation, where ranks share processors; 0: none
    # limits on progress, and times compared with them: nanoseconds of the time that this process has seen pass (clock.h)
    patience own_clock          # the process's clock, in its world's engine
    patience* clock             # points to it, also from a process set's engine
    uint64_t look_ns            # longest time between two looks of the monitor thread; 0: there is no limit to watch
    uint64_t stall_warning_ns   # the setting `stall_warning`; 0: never
    uint64_t stall_limit_ns     # the setting `stall_limit`; 0: never
    uint64_t reported           # time of the last report: overdue operations submitted before it are in it; monitor thread only
    uint64_t asked_for          # `submitted` of the operation about which rank 0 was last asked; under the lock
    uint64_t asked_at           # when it was asked
    device* device              # the open GPU, in the world's engine; NULL: none is
    bint opened                 # whether the ranks of this engine, of the world or of a process set, are connected on it
    device_queue* queue         # of a process set: its items; NULL: of the world, or it has no communicator
    device_queue* queues        # of the world: those of the process sets that this rank is in; under its lock
    uint64_t handed             # items that this engine has handed over; under the lock, as the next two
    uint64_t returned           # of these, those that the lane has ended
    uint64_t last_ticket        # the last that was enqueued
    uint64_t device_passed      # tickets that it had passed at the last look; monitor thread only, as the next two
    uint64_t device_since       # when it came so far, as this process sees time pass; 0: it had passed all
    uint64_t device_warned      # the ticket about which was warned last; 0: none
    device_item* roomless       # items whose results have no room yet, oldest first; under the lock; a failure empties it
    device_item* finding_room   # the one for which room is being made; NULL: none; as the last
    uint32_t rooms_door         # event count (futex) on which whoever makes room sleeps
    uint32_t rooms_closed       # atomic: 1 once nobody needs room any more
    void* opener                # a Python function that opens a GPU by its number, the Engine's; NULL: there is none
    bint held                   # who submits a tensor on a GPU calls it, though the GPU is open; under the GIL
    void* deferred_free         # atomic: stack of operations that are done and abandoned, for a thread with the GIL to free
    Op* deferred_on_device                  # operations that nobody holds, whose tensors the GPU may still use; under the GIL
    char[OVERDUE_BYTES] overdue  # lines for the next stall report; under the lock
    uint32_t[MAX_RANKS] overdue_seen    # rank 0: by rank, 1 + the id in its `overdue` word at the last look; 0: none
    char[REASON_BYTES] account  # rank 0: the last report of who waits for whom, so that it is not repeated
    uint64_t stall_reported     # 1 + sequence of the last entry reported as stalled; 0: none
    uint64_t* alive             # a page of its own, 1 in this process and wiped in a forked child
    Counters counters
    Row[HISTORY] history        # ring; under the lock
    uint64_t rows               # number of rows ever written: the last is at (rows - 1) % HISTORY
    Trace trace                 # the timeline's records; written under the lock
    Marks marks                 # ends of steps for the tuner; rank 0 alone
    counters_page* counters_page  # the process's page of counters; NULL: nothing is counted
    uint32_t group_place        # atomic: 1 + the place of a group's own counters in that page; 0: it has none
    uint64_t unblocked          # atomic: when a caller of this process was last blocked in the engine; the world's alone
    Overlap overlap             # kept while there is a page of counters; under the lock
    uint64_t step_begun         # likewise: nanoseconds, the end of the last step; 0: no step has ended
    uint32_t overdue_count      # operations in flight that were overdue at the monitor's last look
