"""What a rank records for its timeline: a ring of records in the process's own memory, and totals.

Written under the engine's lock, read without it (tracer.pyx) by one thread at a time.
"""
from libc.stdint cimport uint8_t, uint32_t, uint64_t

from engine_ext.control.overlap cimport Overlap
from engine_ext.data.executor cimport Executor
from engine_ext.operations.op cimport Op
from engine_ext.shared.layout cimport engine_entry

cdef enum:
    TRACE_RING = 1 << 21        # bytes
    TRACE_LINES_ENTRY = 8       # lines of a file that an entry may take, without its tensors
    TRACE_LINES_TENSOR = 3

cdef enum RecordType:
    RECORD_PAD = 0              # to the ring's start
    RECORD_NAME = 1             # number, then the text
    RECORD_ENTRY = 2            # then its tensors
    RECORD_WAIT = 3
    RECORD_STEP = 4

cdef struct RecordHead:
    uint32_t bytes              # of the whole record, a multiple of 8
    uint32_t type

cdef struct NameRecord:
    RecordHead head
    uint32_t number, name_bytes

cdef struct SpanRecord:         # WAIT: some caller was blocked. STEP: since the step before
    RecordHead head
    uint64_t begun, ended       # nanoseconds, as all times here

cdef struct EntryRecord:
    RecordHead head
    uint64_t sequence, nbytes, closed, started, ended
    uint64_t[3] first, last, spent      # of the stages; 0 for a stage that had nothing to do
    uint32_t items
    uint8_t type, kind, algorithm, wire

cdef struct TensorRecord:       # `items` of them follow an EntryRecord
    uint64_t submitted, nbytes
    uint64_t arrival            # as in the entry: lateness.pyx
    uint32_t name, unused

cdef struct Budget:             # a token bucket
    double level                # lines in hand; below 0: a debt
    uint64_t filled             # nanoseconds: when it was last refilled

cdef struct Totals:             # of the recording
    uint64_t entries, tensors, nbytes, steps
    uint64_t busy_ns            # in entries
    uint64_t blocked_ns         # some caller waited
    uint64_t exposed_ns         # both
    uint64_t dropped            # records for which the ring had no room

cdef struct Trace:
    uint32_t on                 # atomic: the recording's number, or 0
    uint32_t recordings
    uint64_t since              # when it began
    uint64_t saved_since        # lines have been saved up since then
    uint64_t rate               # atomic: lines a second
    char* ring
    uint64_t head               # atomic: bytes written since the start; the reader acquires
    uint64_t tail               # atomic: bytes read; the writer acquires
    uint32_t names              # numbers given
    uint32_t names_before       # of which in earlier recordings
    Totals totals               # without the times, which are in `overlap`
    Overlap overlap             # since this recording began
    uint64_t step_begun
    Budget spans                # waits and steps

cdef int trace_start(Trace* t, uint64_t now, uint64_t rate, uint64_t saved) noexcept nogil
cdef void trace_stop(Trace* t, uint64_t now) noexcept nogil
cdef void trace_close(Trace* t) noexcept nogil
cdef uint32_t trace_wait_begins(Trace* t, uint64_t now) noexcept nogil
cdef void trace_wait_ends(Trace* t, uint32_t recording, uint64_t now) noexcept nogil
cdef void trace_entry_begins(Trace* t, uint64_t now) noexcept nogil
cdef void trace_entry_ends(Trace* t, const engine_entry* entry, uint64_t now) noexcept nogil
cdef void trace_entry(Trace* t, const engine_entry* entry, Op** batch, const Executor* x, uint64_t started) noexcept nogil
cdef void trace_step(Trace* t, uint64_t now) noexcept nogil
cdef Totals trace_totals(Trace* t, uint64_t now) noexcept nogil
cdef bint budget_has(Budget* b, uint64_t rate, uint64_t now) noexcept nogil
