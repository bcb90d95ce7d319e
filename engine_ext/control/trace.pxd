"""Records of a rank's timeline: a ring in the process's own memory, and totals.

Written under the engine's lock; read without it by one thread at a time (tracer.pyx).
"""
from libc.stdint cimport int32_t, uint32_t, uint64_t, uint8_t

from engine_ext.control.overlap cimport Overlap
from engine_ext.control.step_clock cimport LateStep
from engine_ext.coordinator.coordinator cimport Recording
from engine_ext.data.executor cimport Executor
from engine_ext.gpu.device cimport device_sample
from engine_ext.operations.op cimport Op, Record
from engine_ext.platform.token_bucket cimport TokenBucket
from engine_ext.shared.layout cimport engine_entry

cdef enum:
    TRACE_RING = 1 << 21        # bytes of the ring

cdef enum RecordType:
    RECORD_PAD = 0              # padding: the reader goes on at the ring's start
    RECORD_NAME = 1             # NameRecord, followed by the text
    RECORD_ENTRY = 2            # EntryRecord, followed by its TensorRecords
    RECORD_WAIT = 3             # SpanRecord: a time in which some caller was blocked
    RECORD_STEP = 4             # SpanRecord: the time from the end of one step to the end of the next
    RECORD_SAMPLE = 5           # SampleRecord, followed by its device_slices
    RECORD_LATE_STEP = 6        # LateRecord: a late step, in addition to its RECORD_STEP

cdef struct RecordHead:
    uint32_t bytes              # length of the whole record, a multiple of 8
    uint32_t type               # RecordType

cdef struct NameRecord:
    RecordHead head
    uint32_t number, name_bytes

cdef struct SpanRecord:
    RecordHead head
    uint64_t begun, ended       # nanoseconds, monotonic, as all times in this file

cdef struct EntryRecord:
    RecordHead head
    uint64_t sequence, nbytes, closed, started, ended
    uint64_t[3] first, last, spent      # by stage, as Executor.stage_first, _last and _spent; 0: the stage had nothing to do
    uint32_t items
    uint8_t type, kind, algorithm, wire
    uint8_t dtype               # dtype of the tensors, of a group of its first one

cdef struct TensorRecord:       # `items` of these follow an EntryRecord
    uint64_t submitted, nbytes
    uint64_t arrival            # rank that submitted last and its lateness, packed: see arrival_last in segment.pxd
    uint32_t name, unused

cdef struct SampleRecord:       # a sampled entry on a GPU
    RecordHead head
    uint64_t sequence, nbytes, error_ns
    uint64_t slices

cdef struct LateRecord:
    RecordHead head
    LateStep step

cdef struct Totals:             # totals of a recording, including what has no lines in the file
    uint64_t entries, tensors, nbytes, steps
    uint64_t busy_ns            # nanoseconds in entries
    uint64_t blocked_ns         # nanoseconds in which some caller was blocked
    uint64_t exposed_ns         # nanoseconds in which both held
    uint64_t dropped            # number of records for which the ring had no room

cdef struct Trace:
    Recording recording         # the recording in progress, or else the last one
    uint32_t recordings         # number of recordings ever begun
    char* ring                  # malloc'ed, TRACE_RING bytes; NULL: no recording was ever begun
    uint64_t head               # atomic: bytes ever written, by the lock's holder with release; the reader acquires
    uint64_t tail               # atomic: bytes ever read, by the reader with release; the writer acquires
    uint32_t names              # number of names ever numbered: the last number given
    uint32_t names_before       # value of `names` when this recording began; smaller numbers belong to earlier recordings
    Totals totals               # its times are 0 while recording: `overlap` has them
    Overlap overlap             # overlap since this recording began
    uint64_t step_begun         # end of the last step, or start of the recording
    TokenBucket spans               # budget of lines for waits, steps and samples

cdef int trace_start(Trace* t, uint64_t now, uint64_t rate, uint64_t saved) noexcept nogil
cdef void trace_stop(Trace* t, uint64_t now) noexcept nogil
cdef void trace_close(Trace* t) noexcept nogil
cdef uint32_t trace_wait_begins(Trace* t, uint64_t now) noexcept nogil
cdef void trace_wait_ends(Trace* t, uint32_t recording, uint64_t now) noexcept nogil
cdef void trace_entry_begins(Trace* t, uint64_t now) noexcept nogil
cdef void trace_entry_ends(Trace* t, const engine_entry* entry, uint64_t now) noexcept nogil
cdef void trace_entry(Trace* t, const engine_entry* entry, Op** batch, const Executor* x, uint64_t started,
                      uint64_t closed) noexcept nogil
cdef void trace_sample(Trace* t, const device_sample* sample) noexcept nogil
cdef void trace_step(Trace* t, uint64_t now) noexcept nogil
cdef void trace_late_step(Trace* t, const LateStep* late) noexcept nogil
cdef Totals trace_totals(Trace* t, uint64_t now) noexcept nogil

cdef enum:
    MARKS = 4096                # number of marks that are remembered
    SOURCE_TRAFFIC = -1         # `source` of a mark that traffic has made, not an optimizer

cdef struct Mark:
    uint64_t time               # nanoseconds, monotonic
    uint64_t waited             # nanoseconds for which callers were blocked in the engine since its start
    uint64_t busy               # with `timed`: nanoseconds in which some tensor was ready on all ranks and not done; else 0
    uint64_t nbytes             # bytes of all batches since the engine's start
    uint32_t knob_version       # version of the knobs on the last entry before the mark
    int32_t source              # number of the optimizer that has ended a step, or SOURCE_TRAFFIC

cdef struct Marks:
    Mark* ring                  # malloc'ed, MARKS of them; NULL: nobody tunes
    uint64_t count              # marks ever written: the last is at (count - 1) % MARKS
    # Marks that traffic makes where no optimizer marks steps: at most one of `anchor` and `window` is set.
    Record* anchor              # pinned name: every `every`-th end of an operation of this name makes a mark; NULL: no anchor
    uint32_t window             # number of tensors after which there is a mark; 0: no window
    uint32_t every              # with `anchor`: number of its ends for one mark
    uint32_t passed             # ends of the anchor, or tensors, since the last mark
    bint due                    # whether the entry in progress ends with a mark; written by the driver's role
    uint32_t timed              # atomic: whether `busy` is counted
    uint64_t busy               # nanoseconds of the busy periods that have ended
    uint64_t since              # start of the busy period in progress, nanoseconds, monotonic; 0: there is none

cdef int open_step_marks(Marks* m) noexcept nogil
cdef void close_step_marks(Marks* m) noexcept nogil
cdef void add_step_mark(Marks* m, int32_t source, uint32_t knob_version, uint64_t waited, uint64_t nbytes) noexcept nogil
cdef void count_towards_mark(Marks* m, Op** batch, uint32_t items) noexcept nogil
cdef void note_busy(Marks* m, bint busy) noexcept nogil
