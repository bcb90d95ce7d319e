"""The offset between the clock of the coordinator's host and this host's."""
from libc.stdint cimport uint32_t, uint64_t

from engine_ext.shared.segment cimport Segment
from engine_ext.transport.link cimport Link, engine_times

cdef struct HostClock:
    uint64_t asked_at       # atomic: when this host last asked: nanoseconds, monotonic
    uint32_t answers        # atomic: number of answers that have come, at most MOST_ANSWERS
    uint64_t measured_at    # when the answer in use came: nanoseconds, monotonic; the reader alone, as `error`
    uint64_t error          # half of that exchange's duration: nanoseconds

cdef void host_clock_ask(HostClock* clock, Link* trunk) noexcept nogil
cdef void host_clock_answer(const engine_times* asked, Link* trunk) noexcept nogil
cdef bint host_clock_receive(HostClock* clock, Segment* segment, const engine_times* times, Link* trunk) noexcept nogil
