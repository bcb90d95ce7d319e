"""Marks at the ends of steps. Nobody tunes: one branch for an entry, and one for a pass of rank 0's driver."""
from libc.stdint cimport int32_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free

from engine_ext.platform.atomics cimport now_ns
from engine_ext.platform.clock cimport age_ns


cdef int marks_open(Marks* m) noexcept nogil:
    """-1 without memory."""
    if m.ring == NULL:
        m.ring = <Mark*>calloc(MARKS, sizeof(Mark))
    return 0 if m.ring != NULL else -1


cdef void marks_close(Marks* m) noexcept nogil:
    free(m.ring)
    m.ring = NULL


cdef void marks_add(Marks* m, int32_t source, uint32_t knob_version, uint64_t waited, uint64_t nbytes) noexcept nogil:
    """A step has ended. Of the traffic: the caller holds the driver's role, too."""
    cdef Mark* mark = &m.ring[m.count % MARKS]
    mark.time, mark.source, mark.knob_version, mark.waited, mark.nbytes = now_ns(), source, knob_version, waited, nbytes
    mark.busy = 0
    if source == SOURCE_TRAFFIC:
        mark.busy = m.busy + (age_ns(mark.time, m.since) if m.since else 0)
        m.due = False
    m.count += 1


cdef void marks_pass(Marks* m, Op** batch, uint32_t items) noexcept nogil:
    """The operations of an entry are about to be finished."""
    cdef uint32_t k
    if m.anchor != NULL:
        for k in range(items):
            m.passed += batch[k].record == m.anchor
        if m.passed >= m.every:
            m.passed, m.due = 0, True
    elif m.window:
        m.passed += items
        if m.passed >= m.window:
            m.passed, m.due = 0, True


cdef void marks_busy(Marks* m, bint busy) noexcept nogil:
    """Whether anything is ready on all ranks, and not done, from now on. The caller holds the driver's role."""
    if busy and m.since == 0:
        m.since = now_ns()
    elif not busy and m.since:
        m.busy += age_ns(now_ns(), m.since)
        m.since = 0
