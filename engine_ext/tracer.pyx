"""The timeline of an engine, written as lines of Chrome's trace format, and the control of its recording.

One thread at a time drains. It formats and writes without the GIL. Each line is an event. No line crosses a page of the file
(blanks fill the page up), and each page is written by one call. So a killed process leaves only whole lines.
"""
from libc.errno cimport EINTR, ENOSPC, errno
from libc.stdint cimport uint32_t, uint64_t
from libc.stdio cimport snprintf
from libc.stdlib cimport free, realloc
from libc.string cimport memmove, memset

from engine_ext.control.state cimport State
from engine_ext.control.step_clock cimport PART_COMPUTE, PART_CPU, PART_GC, PART_INPUT, PART_WAIT, LateStep
from engine_ext.control.trace cimport (
    TRACE_RING, EntryRecord, LateRecord, NameRecord, RecordHead, RecordType, SampleRecord, SpanRecord, TensorRecord, Totals,
    trace_start, trace_stop, trace_totals,
)
from engine_ext.coordinator.lateness cimport TRACE_LINES_ENTRY, TRACE_LINES_TENSOR
from engine_ext.core cimport Engine
from engine_ext.gpu.device cimport device_slice
from engine_ext.kernels.kernels cimport ENGINE_DTYPE_NAMES
from engine_ext.operations.kinds cimport kind_name
from engine_ext.platform.atomics cimport load_acquire, now_ns, store32_relaxed, store_relaxed, store_release
from engine_ext.platform.posix cimport PAGE, ftruncate, pthread_mutex_lock, pthread_mutex_unlock, write
from engine_ext.shared.counters cimport LATE_NAMES
from engine_ext.shared.layout cimport ALGORITHM_NAMES, ENTRY_BATCH, ENTRY_SKIP, WIRE_NAMES
from engine_ext.shared.segment cimport ahead_ns, arrival_last, arrival_late_us, arrival_wait_us, clocked, coordinates

from engine_ext.errors import EngineError

cdef enum:
    LINE = 512                  # most bytes of a line, except one that names a row
    NAME_LINE = PAGE            # most bytes of a line that names a row
    NAME_TEXT = 3500            # most bytes of an escaped name in it; the rest is cut off
    FLUSH = 1 << 18             # bytes that are formatted before they are written

cdef enum Row:                  # `tid` of each row of the timeline
    ROW_STEPS = 1
    ROW_WAITS = 2
    ROW_ENTRIES = 3
    ROW_STAGES = 4              # three rows, one for each stage
    ROW_CYCLES = 7
    ROW_DEVICE = 8
    ROW_LATE_STEPS = 9
    ROW_TENSORS = 16            # first row of the tensors: plus the name's number

cdef const char** STAGE_NAMES = ["fuse", "reduce", "unpack"]
cdef const char** DEVICE_NAMES = ["queue", "pack", "NCCL", "unpack"]     # by DEVICE_*; no slice of an entry has "queue"

cdef const char* SAMPLED = ("entries with a tensor that was drawn, one of some 16; lengths by the GPU's clock, places on the "
                            "host's by an event that the GPU passed between two looks at that: error_us, and drift since")

cdef struct Lines:
    char* data
    size_t used, room           # bytes in use, bytes allocated
    uint64_t offset             # offset of data[0] in the file
    int track                   # `pid` of every event
    const int* numbers          # numbers of the ranks in the world
    uint64_t ahead              # added to every time, since the file has times of rank 0's host; nanoseconds
    bint cycles                 # draw an instant for each closed entry
    bint device_named           # the GPU's row has its name, which it gets with its first slice
    bint late_named             # likewise the row of late steps


cdef bint reserve_bytes(Lines* lines, size_t nbytes) noexcept nogil:
    """Make room for `nbytes` more bytes of lines; return False without memory."""
    cdef char* data
    if lines.room - lines.used < nbytes:
        data = <char*>realloc(lines.data, lines.used + nbytes)
        if data == NULL:
            return False
        lines.data, lines.room = data, lines.used + nbytes
    return True


cdef void end_line(Lines* lines, size_t nbytes) noexcept nogil:
    """Keep the line that was formatted at `used`, moved to the next page if it would cross into it."""
    cdef char* line = lines.data + lines.used
    cdef size_t left = PAGE - <size_t>((lines.offset + lines.used) % PAGE)
    if nbytes > left:
        memmove(line + left, line, nbytes)
        memset(line, c" ", left)
        nbytes += left
    lines.used += nbytes


cdef int write_lines(Lines* lines, int fd) noexcept nogil:
    """Write page by page; return 0 or an errno. If the disk is full, the partly written page is removed from the file."""
    cdef size_t at = 0, count
    cdef long done
    while at < lines.used:
        count = min(lines.used - at, PAGE - <size_t>((lines.offset + at) % PAGE))
        done = write(fd, lines.data + at, count)
        if done < 0 and errno == EINTR:
            continue
        if done != <long>count:
            count = <size_t>(errno if done < 0 else ENOSPC)
            ftruncate(fd, <long>(lines.offset + at))
            return <int>count
        at += count
    lines.offset += lines.used
    lines.used = 0
    return 0


cdef size_t slice_head(Lines* lines, uint64_t row, const char* name, uint64_t begun, uint64_t ended) noexcept nogil:
    """Format the beginning of a complete event, up to its arguments, and return its length. Times are microseconds with three
    decimals."""
    cdef uint64_t lasted = ended - begun if ended > begun else 0
    begun += lines.ahead
    return <size_t>snprintf(
        lines.data + lines.used, LINE, ',{"ph":"X","pid":%d,"tid":%llu,"ts":%llu.%03llu,"dur":%llu.%03llu,"name":"%s"',
        lines.track, <unsigned long long>row, <unsigned long long>(begun // 1000), <unsigned long long>(begun % 1000),
        <unsigned long long>(lasted // 1000), <unsigned long long>(lasted % 1000), name)


cdef void draw_span(Lines* lines, uint64_t row, const char* name, const SpanRecord* span) noexcept nogil:
    """Draw a wait or a step."""
    cdef size_t n = slice_head(lines, row, name, span.begun, span.ended)
    end_line(lines, n + <size_t>snprintf(lines.data + lines.used + n, LINE - n, "}\n"))


cdef void draw_tensor(Lines* lines, const EntryRecord* entry, const TensorRecord* tensor, const char* what) noexcept nogil:
    """Draw three slices on the tensor's own row: negotiate, queue, and the operation."""
    cdef uint64_t row = ROW_TENSORS + tensor.name, ready = entry.closed - arrival_wait_us(tensor.arrival) * 1000
    cdef unsigned long long sequence = entry.sequence, nbytes = tensor.nbytes, late = arrival_late_us(tensor.arrival)
    cdef int last = arrival_last(tensor.arrival)
    cdef size_t n = slice_head(lines, row, "negotiate", tensor.submitted, ready)
    if last >= 0:
        n += <size_t>snprintf(lines.data + lines.used + n, LINE - n, ',"args":{"entry":%llu,"last":%d,"late_us":%llu}}\n',
                              sequence, lines.numbers[last], late)
    else:
        n += <size_t>snprintf(lines.data + lines.used + n, LINE - n, ',"args":{"entry":%llu}}\n', sequence)
    end_line(lines, n)
    n = slice_head(lines, row, "queue", ready, entry.started)
    end_line(lines, n + <size_t>snprintf(lines.data + lines.used + n, LINE - n, ',"args":{"entry":%llu}}\n', sequence))
    n = slice_head(lines, row, what, entry.started, entry.ended)
    n += <size_t>snprintf(
        lines.data + lines.used + n, LINE - n,
        ',"args":{"entry":%llu,"bytes":%llu,"fuse_us":%llu,"reduce_us":%llu,"unpack_us":%llu}}\n', sequence, nbytes,
        <unsigned long long>(entry.spent[0] // 1000), <unsigned long long>(entry.spent[1] // 1000),
        <unsigned long long>(entry.spent[2] // 1000))
    end_line(lines, n)


cdef void draw_entry(Lines* lines, const EntryRecord* entry) noexcept nogil:
    """Draw an entry: its slice, its stages and its tensors."""
    cdef const TensorRecord* tensors = <const TensorRecord*>(<const char*>entry + sizeof(EntryRecord))
    cdef const char* what = kind_name(entry.kind)
    cdef unsigned long long sequence = entry.sequence, nbytes = entry.nbytes
    cdef unsigned long long closed = entry.closed + lines.ahead
    cdef size_t n
    cdef uint32_t i
    cdef int stage
    if entry.type == ENTRY_SKIP:        # no rank submitted a tensor: nothing was moved
        what = b"skip"
    if lines.cycles:
        end_line(lines, <size_t>snprintf(
            lines.data + lines.used, LINE,
            ',{"ph":"i","s":"p","pid":%d,"tid":%d,"ts":%llu.%03llu,"name":"cycle","args":{"entry":%llu}}\n', lines.track,
            <int>Row.ROW_CYCLES, closed // 1000, closed % 1000, sequence))
    n = slice_head(lines, Row.ROW_ENTRIES, what, entry.started, entry.ended)
    n += <size_t>snprintf(lines.data + lines.used + n, LINE - n,
                          ',"args":{"entry":%llu,"tensors":%u,"bytes":%llu,"algorithm":"%s"', sequence, entry.items,
                          nbytes, ALGORITHM_NAMES[entry.algorithm])
    if entry.type == ENTRY_BATCH and nbytes:       # a barrier has no dtype
        n += <size_t>snprintf(lines.data + lines.used + n, LINE - n, ',"dtype":"%s"', ENGINE_DTYPE_NAMES[entry.dtype])
    if entry.wire:
        n += <size_t>snprintf(lines.data + lines.used + n, LINE - n, ',"compression":"%s"', WIRE_NAMES[entry.wire])
    end_line(lines, n + <size_t>snprintf(lines.data + lines.used + n, LINE - n, "}}\n"))
    for stage in range(3):
        if entry.first[stage]:
            n = slice_head(lines, Row.ROW_STAGES + stage, STAGE_NAMES[stage], entry.first[stage], entry.last[stage])
            n += <size_t>snprintf(lines.data + lines.used + n, LINE - n, ',"args":{"entry":%llu,"busy_us":%llu}}\n', sequence,
                                  <unsigned long long>(entry.spent[stage] // 1000))
            end_line(lines, n)
    for i in range(entry.items):
        draw_tensor(lines, entry, &tensors[i], what)


cdef void draw_sample(Lines* lines, const SampleRecord* sample) noexcept nogil:
    """Draw the work of a GPU for an entry, by the host's clock; exact but for `error_us` and drift."""
    cdef const device_slice* slices = <const device_slice*>(<const char*>sample + sizeof(SampleRecord))
    cdef size_t n
    cdef uint64_t k
    if not lines.device_named:
        lines.device_named = True
        end_line(lines, <size_t>snprintf(
            lines.data + lines.used, LINE,
            ',{"ph":"M","pid":%d,"tid":%d,"name":"thread_name","args":{"name":"GPU (sampled entries)",'
            '"about":"%s"}}\n', lines.track, <int>Row.ROW_DEVICE, SAMPLED))
    for k in range(sample.slices):
        n = slice_head(lines, Row.ROW_DEVICE, DEVICE_NAMES[slices[k].stage], slices[k].begun, slices[k].ended)
        n += <size_t>snprintf(
            lines.data + lines.used + n, LINE - n, ',"args":{"entry":%llu,"bytes":%llu,"error_us":%llu.%03llu}}\n',
            <unsigned long long>sample.sequence, <unsigned long long>sample.nbytes,
            <unsigned long long>(sample.error_ns // 1000), <unsigned long long>(sample.error_ns % 1000))
        end_line(lines, n)


cdef void draw_late_step(Lines* lines, const LateStep* late) noexcept nogil:
    """Draw a late step with its cause, and how long the program was in each part of it."""
    cdef char[32] name
    cdef size_t n
    if not lines.late_named:
        lines.late_named = True
        end_line(lines, <size_t>snprintf(
            lines.data + lines.used, LINE, ',{"ph":"M","pid":%d,"tid":%d,"name":"thread_name","args":{"name":"late steps"}}\n',
            lines.track, <int>Row.ROW_LATE_STEPS))
    snprintf(name, sizeof(name), "late: %s", LATE_NAMES[late.cause])
    n = slice_head(lines, Row.ROW_LATE_STEPS, name, late.begun, late.ended)
    n += <size_t>snprintf(lines.data + lines.used + n, LINE - n, ',"args":{"cause":"%s","late_us":%llu', LATE_NAMES[late.cause],
                          <unsigned long long>(late.excess // 1000))
    if late.rank >= 0:
        n += <size_t>snprintf(lines.data + lines.used + n, LINE - n, ',"rank":%d', <int>late.rank)
    n += <size_t>snprintf(
        lines.data + lines.used + n, LINE - n, ',"input_us":%llu,"compute_us":%llu,"gc_us":%llu,"cpu_us":%llu,"wait_us":%llu}}\n',
        <unsigned long long>(late.parts.ns[PART_INPUT] // 1000), <unsigned long long>(late.parts.ns[PART_COMPUTE] // 1000),
        <unsigned long long>(late.parts.ns[PART_GC] // 1000), <unsigned long long>(late.parts.ns[PART_CPU] // 1000),
        <unsigned long long>(late.parts.ns[PART_WAIT] // 1000))
    end_line(lines, n)


cdef void draw_name(Lines* lines, const NameRecord* name) noexcept nogil:
    """Name the row of a tensor by a metadata event. The name is valid UTF-8."""
    cdef const unsigned char* text = <const unsigned char*>name + sizeof(NameRecord)
    cdef char* line = lines.data + lines.used
    cdef size_t n = <size_t>snprintf(line, LINE, ',{"ph":"M","pid":%d,"tid":%u,"name":"thread_name","args":{"name":"',
                                     lines.track, <int>Row.ROW_TENSORS + name.number)
    cdef uint32_t i
    for i in range(name.name_bytes):
        if n > NAME_TEXT and text[i] & 0xC0 != 0x80:        # at the beginning of a character
            break
        if text[i] == c'"' or text[i] == c"\\":
            line[n] = c"\\"
            line[n + 1] = <char>text[i]
            n += 2
        elif text[i] < 0x20:
            n += <size_t>snprintf(line + n, 8, "\\u%04x", <unsigned int>text[i])
        else:
            line[n] = <char>text[i]
            n += 1
    end_line(lines, n + <size_t>snprintf(line + n, LINE, '"}}\n'))


cdef size_t most_bytes(const RecordHead* head) noexcept nogil:
    """Return an upper bound of the bytes of a record's lines. Each line may have to be moved by its own length."""
    if head.type == RecordType.RECORD_NAME:
        return 2 * NAME_LINE
    if head.type == RecordType.RECORD_SAMPLE:
        return 2 * LINE * (1 + <size_t>(<const SampleRecord*>head).slices)
    if head.type == RecordType.RECORD_LATE_STEP:
        return 4 * LINE
    if head.type == RecordType.RECORD_ENTRY:
        return 2 * LINE * (TRACE_LINES_ENTRY + TRACE_LINES_TENSOR * <size_t>(<const EntryRecord*>head).items)
    return 2 * LINE


cdef int drain(State* e, Lines* lines, int fd, uint64_t limit, uint64_t* left_out) noexcept nogil:
    """Write all recorded lines; return 0 or an errno. Records beyond `limit` bytes of the file are counted in `left_out`
    instead."""
    cdef uint64_t head = load_acquire(&e.trace.head), tail = e.trace.tail      # pairs with publish(): the records are whole
    cdef const RecordHead* record
    cdef size_t before
    cdef int status = 0
    while tail < head and status == 0:
        record = <const RecordHead*>(e.trace.ring + tail % TRACE_RING)
        if record.type != RecordType.RECORD_PAD:
            before = lines.used
            if left_out[0] or not reserve_bytes(lines, most_bytes(record)):
                left_out[0] += 1
            else:
                if record.type == RecordType.RECORD_NAME:
                    draw_name(lines, <const NameRecord*>record)
                elif record.type == RecordType.RECORD_ENTRY:
                    draw_entry(lines, <const EntryRecord*>record)
                elif record.type == RecordType.RECORD_SAMPLE:
                    draw_sample(lines, <const SampleRecord*>record)
                elif record.type == RecordType.RECORD_LATE_STEP:
                    draw_late_step(lines, &(<const LateRecord*>record).step)
                elif record.type == RecordType.RECORD_WAIT:
                    draw_span(lines, Row.ROW_WAITS, b"wait", <const SpanRecord*>record)
                else:
                    draw_span(lines, Row.ROW_STEPS, b"step", <const SpanRecord*>record)
                if lines.offset + lines.used > limit:
                    lines.used = before
                    left_out[0] += 1
        tail += record.bytes
        store_release(&e.trace.tail, tail)                  # pairs with reserve(): the record has been read
        if lines.used >= FLUSH:
            status = write_lines(lines, fd)
    return write_lines(lines, fd) if status == 0 else status


cdef class Tracer:
    """The recording of one engine's timeline."""
    cdef Engine engine
    cdef int track                   # `pid` of its events
    cdef Lines lines
    cdef readonly uint64_t left_out  # records of this recording that exceeded the file's limit

    def __cinit__(self, Engine engine not None, int track):
        self.engine, self.track = engine, track

    def __dealloc__(self):
        free(self.lines.data)

    cdef State* state(self) except NULL:
        """Return the engine's state; raise in a forked child."""
        if self.engine.state.alive == NULL or self.engine.state.alive[0] != 1:
            raise EngineError("the timeline belongs to the parent of this forked process")
        return self.engine.state

    @property
    def closed(self):
        """True if the engine was closed, so that nothing more will be recorded."""
        return self.engine.state.closed

    def start(self, uint64_t rate, double saved):
        """Begin a recording of at most `rate` lines a second on average, with `saved` seconds of that rate in hand."""
        cdef State* e = self.state()
        cdef int status
        pthread_mutex_lock(&e.lock)
        status = -2 if e.trace.recording.on else trace_start(&e.trace, now_ns(), rate, <uint64_t>(saved * 1e9))
        pthread_mutex_unlock(&e.lock)
        if status == -2:
            raise EngineError("a timeline is being recorded already")
        if status:
            raise MemoryError("no memory to record a timeline in")
        if coordinates(&e.segment):
            store32_relaxed(&e.segment.coordinator.recording, 1)
        self.left_out = 0

    def stop(self):
        """End the recording."""
        cdef State* e = self.state()
        if coordinates(&e.segment):
            store32_relaxed(&e.segment.coordinator.recording, e.counters_page != NULL)
        pthread_mutex_lock(&e.lock)
        trace_stop(&e.trace, now_ns())
        pthread_mutex_unlock(&e.lock)

    @property
    def clocked(self):
        """True if times in the file are those of rank 0's host; else they are this host's."""
        return clocked(self.state().segment.world)

    def set_rate(self, uint64_t rate):
        """Change the rate of lines a second."""
        store_relaxed(&self.state().trace.recording.rate, rate)

    def drain(self, int fd, uint64_t offset, uint64_t limit, bint cycles):
        """Append recorded lines to a file of `offset` bytes, up to `limit` bytes; return its new size. `cycles`: as in Lines."""
        cdef State* e = self.state()
        cdef int status
        if e.trace.ring == NULL:
            return offset
        self.lines.used, self.lines.offset, self.lines.cycles = 0, offset, cycles
        self.lines.track, self.lines.numbers, self.lines.ahead = self.track, e.segment.numbers, ahead_ns(e.segment.world)
        with nogil:
            status = drain(e, &self.lines, fd, limit, &self.left_out)
        if status:
            raise OSError(status, "cannot write the timeline")
        return self.lines.offset

    def totals(self):
        """Return the totals of the recording."""
        cdef State* e = self.state()
        cdef Totals totals
        cdef uint64_t since, now = now_ns()
        pthread_mutex_lock(&e.lock)
        totals, since = trace_totals(&e.trace, now), e.trace.recording.since
        pthread_mutex_unlock(&e.lock)
        return {"since_ns": since, "now_ns": now, "entries": totals.entries, "tensors": totals.tensors, "bytes": totals.nbytes,
                "steps": totals.steps, "busy_ns": totals.busy_ns, "wait_ns": totals.blocked_ns,
                "exposed_ns": totals.exposed_ns, "dropped": totals.dropped}
