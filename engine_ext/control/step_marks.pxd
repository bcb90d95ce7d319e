"""What the tuner measures by, on rank 0: marks at the ends of steps. All of it is under the engine's lock but for `timed` and
what follows it, which belong to the driver's role."""
from libc.stdint cimport int32_t, uint32_t, uint64_t

from engine_ext.operations.op cimport Op, Record


cdef enum:
    MARKS = 4096                # remembered
    SOURCE_TRAFFIC = -1         # of a mark that no optimizer has made

cdef struct Mark:
    uint64_t time               # nanoseconds, monotonic
    uint64_t waited             # nanoseconds that callers have been blocked in the engine, up to then
    uint64_t busy               # nanoseconds in which something was ready on all ranks and not done; 0: nobody counts
    uint64_t nbytes             # of all entries so far
    uint32_t knob_version       # of the last entry before it
    int32_t source              # the optimizer whose step has ended

cdef struct Marks:
    Mark* ring                  # NULL: nobody tunes
    uint64_t count              # marks that went into it
    # Of the traffic, when no optimizer tells what a step is; at most one of the next two.
    Record* anchor              # pinned: the end of this tensor is a mark
    uint32_t window             # so many tensors are a mark
    uint32_t every              # so many ends of the anchor are one
    uint32_t passed             # of either, since the last mark
    bint due                    # the entry in progress ends with a mark
    uint32_t timed              # atomic: `busy` is counted
    uint64_t busy               # of what is over
    uint64_t since              # when it became busy; 0: it is not

cdef int marks_open(Marks* m) noexcept nogil
cdef void marks_close(Marks* m) noexcept nogil
cdef void marks_add(Marks* m, int32_t source, uint32_t knob_version, uint64_t waited, uint64_t nbytes) noexcept nogil
cdef void marks_pass(Marks* m, Op** batch, uint32_t items) noexcept nogil
cdef void marks_busy(Marks* m, bint busy) noexcept nogil
