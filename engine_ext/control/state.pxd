"""All that one rank's engine holds, outside of Python."""
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t, uint8_t

from engine_ext.control.coordinator cimport Coordinator
from engine_ext.control.step_marks cimport Marks
from engine_ext.control.overlap cimport Overlap
from engine_ext.control.table cimport Table
from engine_ext.control.trace cimport Trace
from engine_ext.data.executor cimport Executor
from engine_ext.operations.op cimport Op
from engine_ext.platform.clock cimport patience
from engine_ext.platform.posix cimport pthread_mutex_t, pthread_t
from engine_ext.shared.counters cimport counters_page
from engine_ext.shared.layout cimport KINDS, MAX_RANKS, REASON_BYTES, engine_entry, engine_knobs
from engine_ext.shared.segment cimport Segment
from engine_ext.transport.arena cimport Arena
from engine_ext.transport.shm cimport SharedMemory

cdef enum Role:             # who drives: one word
    ENGINE_ASLEEP = 0       # the engine thread, asleep on its door: a waiter may take the role by compare-and-swap
    ENGINE = 1              # the engine thread, in a pass
    WAITER = 2              # a thread in a blocking call

cdef enum:                  # for the monitor thread
    EVENT_ABORT = 1
    EVENT_SIGNAL = 2
    EVENT_STALL = 4
    EVENT_CLOSED = 8

cdef enum:
    HISTORY = 512           # entries remembered
    HISTORY_NAME = 64
    OVERDUE_BYTES = 8192

cdef struct Row:            # of the history
    uint64_t sequence
    uint8_t type
    uint8_t kind
    uint8_t algorithm
    uint8_t stores
    uint8_t wire            # as in engine_meta, of an entry
    uint32_t items
    uint64_t nbytes
    uint32_t knob_version
    uint64_t started        # nanoseconds, monotonic
    uint64_t ended          # 0: not yet
    char[HISTORY_NAME] name  # of its first member

cdef struct Counters:
    uint64_t entries
    uint64_t tensors
    uint64_t nbytes
    uint64_t wait_ns        # callers blocked in the engine
    uint64_t busy_ns        # from the start to the end of entries
    uint64_t sleeps         # of callers that drive, on their door
    uint64_t yields         # of the processor, by callers that drive
    uint64_t late           # waits that a tick ended although there was something to do: lost or very late wake-ups

cdef struct Told:            # a tensor of a group, to ranks that have joined (joined_groups.pyx)
    int64_t rows
    int64_t row_bytes
    int64_t dtype

cdef struct State:
    Segment segment
    State* world                # of a process set; else itself
    State* sets                 # of a world: those of its process sets, under its lock
    State* beside               # the next of them
    Table table
    Arena arena
    SharedMemory transport
    Executor executor
    Coordinator coordinator     # rank 0
    pthread_mutex_t lock        # table, knobs to come, history
    # the driver's role
    uint32_t role               # atomic
    uint32_t waiters            # atomic: threads in a blocking call
    uint32_t local_door         # event count of waiters that do not drive
    uint32_t stop               # atomic: the engine thread is to end
    bint threaded
    pthread_t thread
    # the entry in progress, owned by whoever holds the role
    engine_entry* entry
    uint64_t entry_begun        # nanoseconds: when this rank began the last entry
    Op** batch
    int32_t batch_room
    bint telling                # its groups are being told; the operation itself comes then
    Told* told                  # malloc'ed
    uint64_t told_room
    uint64_t brought_bytes      # since this rank last woke the leader
    uint64_t drained            # bytes of this rank's request ring that its waiters know to be free
    engine_knobs seen           # as stamped on the last entry
    uint64_t fusion_threshold   # atomic: of `seen`; submissions look without the lock
    uint64_t seen_entry         # the entry that brought this version
    engine_knobs wanted         # rank 0: to be used from the next step on
    uint32_t wanted_new         # atomic
    # join
    bint joined                 # this rank brings nothing, and stands in for what it would bring; under the lock
    uint32_t joins              # atomic: joins that have ended
    int last_joined             # the last rank to join the last of them
    bint joins_reported         # that others do not join has been reported
    # calls, under the GIL
    bint closed                 # this rank's engine was shut down
    uint64_t[KINDS] unnamed     # operations without a name that this rank has brought, by kind
    unsigned long caller        # the first thread that has used this engine; 0: none has
    bint several                # other threads have used it, too
    # failure and the monitor
    uint32_t failed             # atomic
    int events_fd
    uint32_t events             # atomic
    int* peers                  # pidfds
    uint64_t spin_ns            # how long a caller spins before it sleeps
    uint64_t yield_ns           # how long it yields instead, in a small operation, where ranks share processors; 0: not at all
    # limits on progress, and times that are compared with them: as this process has seen time pass
    patience own_clock          # of a world
    patience* clock             # of the process; a process set has its world's
    uint64_t look_ns            # how often the monitor looks, at least; 0: there is no limit
    uint64_t stall_warning_ns
    uint64_t stall_limit_ns
    uint64_t reported           # what was brought before this has been reported, if it was overdue; the monitor's
    uint64_t asked_for          # when the operation was brought about which rank 0 was last asked; under the lock
    uint64_t asked_at           # since when
    void* deferred_free       # atomic stack of operations that are done and abandoned
    char[OVERDUE_BYTES] overdue  # lines for the next stall report; under the lock
    uint32_t[MAX_RANKS] heard   # rank 0: what each rank has said to be overdue, as id + 1; 0: nothing
    char[REASON_BYTES] account  # rank 0: the last account of who waits for whom
    uint64_t stall_reported     # 1 + the entry whose standing still has been reported
    uint64_t* alive             # a page that a forked child finds zero
    Counters counters
    Row[HISTORY] history
    uint64_t rows
    Trace trace                 # written under the lock
    Marks marks                 # rank 0
    counters_page* counters_page  # of the process; NULL: nothing is counted
    Overlap overlap             # while there is a page; under the lock
    uint64_t step_begun         # the same
    uint32_t overdue_count      # operations in flight that were overdue at the monitor's last look
