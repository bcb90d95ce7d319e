"""The records of a rank's timeline: a ring in the process's own memory, and totals.

Written under the engine's lock, read without it (tracer.pyx) by one thread at a time.
"""
from libc.stdint cimport int32_t, uint32_t, uint64_t, uint8_t

from engine_ext.control.overlap cimport Overlap
from engine_ext.coordinator.coordinator cimport Recording
from engine_ext.data.executor cimport Executor
from engine_ext.gpu.device cimport device_sample
from engine_ext.operations.op cimport Op, Record
from engine_ext.platform.token_bucket cimport TokenBucket
from engine_ext.shared.layout cimport engine_entry

cdef enum:
    TRACE_RING = 1 << 21        # bytes of the ring

cdef enum RecordType:
    RECORD_PAD = 0              # the reader goes on at the ring's start
    RECORD_NAME = 1             # NameRecord, then the text
    RECORD_ENTRY = 2            # EntryRecord, then its TensorRecords
    RECORD_WAIT = 3             # SpanRecord: some caller was blocked
    RECORD_STEP = 4             # SpanRecord: from the end of one step to the next
    RECORD_SAMPLE = 5           # SampleRecord, then its device_slices

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
    uint64_t[3] first, last, spent      # by stage, as stage_first .. of Executor; 0 for a stage that had nothing to do
    uint32_t items
    uint8_t type, kind, algorithm, wire

cdef struct TensorRecord:       # `items` of them follow an EntryRecord
    uint64_t submitted, nbytes
    uint64_t arrival            # the rank that was last, and its lateness, packed: see lateness.pxd
    uint32_t name, unused

cdef struct SampleRecord:       # of an entry on a GPU
    RecordHead head
    uint64_t sequence, nbytes, error_ns
    uint64_t slices

cdef struct Totals:             # of a recording, whether all of it has lines in the file or not
    uint64_t entries, tensors, nbytes, steps
    uint64_t busy_ns            # time in entries
    uint64_t blocked_ns         # time in which some caller was blocked
    uint64_t exposed_ns         # time in which both held
    uint64_t dropped            # records for which the ring had no room

cdef struct Trace:
    Recording recording         # in progress, or the last one
    uint32_t recordings         # recordings that were ever begun
    char* ring                  # TRACE_RING bytes; NULL: no recording was ever begun
    uint64_t head               # atomic: bytes ever written; the reader acquires
    uint64_t tail               # atomic: bytes ever read; the writer acquires
    uint32_t names              # numbers ever given to names
    uint32_t names_before       # of these, numbers given in earlier recordings
    Totals totals               # the times in it are 0: `overlap` has them
    Overlap overlap             # since this recording began
    uint64_t step_begun         # when the last step ended, or the recording began
    TokenBucket spans               # lines for waits and steps

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
cdef Totals trace_totals(Trace* t, uint64_t now) noexcept nogil

cdef enum:
    MARKS = 4096                # marks that are remembered
    SOURCE_TRAFFIC = -1         # source of a mark that the traffic has made, and no optimizer

cdef struct Mark:
    uint64_t time               # nanoseconds, monotonic
    uint64_t waited             # nanoseconds for which callers were blocked in the engine, since its start
    uint64_t busy               # nanoseconds in which a tensor was ready on all ranks and not done, while `timed`; else 0
    uint64_t nbytes             # bytes of all batches since the engine's start
    uint32_t knob_version       # version of the knobs on the last entry before the mark
    int32_t source              # number of the optimizer whose step has ended, or SOURCE_TRAFFIC

cdef struct Marks:
    Mark* ring                  # malloc'ed, MARKS of them; NULL: nobody tunes
    uint64_t count              # marks ever written: the last is at (count - 1) % MARKS
    # Marks of the traffic, where no optimizer marks steps: at most one of `anchor` and `window` is set.
    Record* anchor              # pinned: every `every`-th end of this tensor is a mark; NULL: none is
    uint32_t window             # every so many tensors there is a mark; 0: there is none
    uint32_t every
    uint32_t passed             # ends of the anchor, or tensors, since the last mark
    bint due                    # whether the entry in progress ends with a mark
    uint32_t timed              # atomic: whether busy time is counted
    uint64_t busy               # nanoseconds of busy periods that are over
    uint64_t since              # nanoseconds, monotonic: when the current busy period began; 0: there is none

cdef int marks_open(Marks* m) noexcept nogil
cdef void marks_close(Marks* m) noexcept nogil
cdef void marks_add(Marks* m, int32_t source, uint32_t knob_version, uint64_t waited, uint64_t nbytes) noexcept nogil
cdef void marks_pass(Marks* m, Op** batch, uint32_t items) noexcept nogil
cdef void marks_busy(Marks* m, bint busy) noexcept nogil
