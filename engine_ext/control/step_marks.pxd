"""Marks at the ends of steps, on rank 0, by which the tuner measures. Under the engine's lock, except `timed` and the fields
after it, which belong to the driver's role."""
from libc.stdint cimport int32_t, uint32_t, uint64_t

from engine_ext.operations.op cimport Op, Record


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
