"""How far the clock of the coordinator's host is ahead of this host's."""
from libc.stdint cimport uint32_t, uint64_t

from engine_ext.shared.segment cimport Segment
from engine_ext.transport.link cimport Link, engine_times

cdef struct HostClock:
    uint64_t asked_at       # atomic: when the coordinator's rank was last asked: nanoseconds, monotonic
    uint32_t answers        # atomic: answers that have come, up to MOST_ANSWERS
    uint64_t measured_at    # when the answer that counts came; the network thread alone, as the next
    uint64_t error          # half of that exchange's time

cdef void host_clock_ask(HostClock* clock, Link* trunk) noexcept nogil
cdef void host_clock_answer(const engine_times* asked, Link* trunk) noexcept nogil
cdef bint host_clock_receive(HostClock* clock, Segment* segment, const engine_times* times, Link* trunk) noexcept nogil
