"""Compares the clock of this host with that of the coordinator's host, which may have booted at another time.

The leader asks over its trunk, and the reader of the coordinator's rank answers. That gives four times, two of either
clock. The coordinator's clock is ahead by (received - asked + answered - came) / 2. That is wrong by at most half of the
exchange's duration, so the shortest exchange counts. An older one loses what clocks may drift apart meanwhile.

The result is in the header of this host's segment. It serves statistics and texts for people: nothing is decided by it.
"""
from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memset

from engine_ext.platform.atomics cimport load32_relaxed, load_relaxed, now_ns, store32_relaxed, store32_release, store_relaxed
from engine_ext.platform.clock cimport age_ns, overdue_ns
from engine_ext.transport.link cimport FRAME_CLOCK, engine_frame, link_flush, link_queue

cdef enum:
    AT_ONCE = 5             # exchanges at the start without a pause; the first may wait for a process, and does not count
    MOST_ANSWERS = 32       # largest number of answers that is counted
    LONGEST_PAUSE_SHIFT = 10    # largest number of doublings of the pause
    DRIFT = 20000           # clocks drift apart by at most one part in this
    LONGEST_NS = 60000000000    # a longer exchange tells nothing

cdef uint64_t PAUSE_NS = 10000000   # pause after the exchanges at the start; each pause is twice as long as the last, up to 10 s


cdef void send_question(HostClock* clock, Link* trunk, uint64_t now) noexcept nogil:
    """Send a question with the time `now`."""
    cdef engine_frame frame
    cdef engine_times times
    memset(&frame, 0, sizeof(frame))
    memset(&times, 0, sizeof(times))
    frame.type, frame.bytes = FRAME_CLOCK, sizeof(engine_times)
    times.asked = now
    store_relaxed(&clock.asked_at, now)
    link_queue(trunk, &frame, <const char*>&times)
    link_flush(trunk)


cdef void host_clock_ask(HostClock* clock, Link* trunk) noexcept nogil:
    """Ask if it is time to. The leader calls this when it relays and nothing waits to be sent, so an idle job asks nothing."""
    cdef uint32_t answers = load32_relaxed(&clock.answers)
    cdef uint64_t asked_at = load_relaxed(&clock.asked_at), now = now_ns()
    cdef int doubled = min(max(<int>answers - AT_ONCE, 0), <int>LONGEST_PAUSE_SHIFT)
    if asked_at == 0 or (answers >= AT_ONCE and overdue_ns(now, asked_at, PAUSE_NS << doubled)):
        send_question(clock, trunk, now)


cdef void host_clock_answer(const engine_times* asked, Link* trunk) noexcept nogil:
    """Answer a question at once. Called by the reader of a rank of the coordinator's host."""
    cdef engine_frame frame
    cdef engine_times times
    memset(&frame, 0, sizeof(frame))
    frame.type, frame.bytes = FRAME_CLOCK, sizeof(engine_times)
    times.asked, times.received = asked.asked, now_ns()
    times.answered = times.received
    link_queue(trunk, &frame, <const char*>&times)
    link_flush(trunk)


cdef bint host_clock_receive(HostClock* clock, Segment* segment, const engine_times* answer, Link* trunk) noexcept nogil:
    """Take in an answer. Called by the reader alone. False if it cannot be an answer."""
    cdef uint64_t now = now_ns(), took, error
    cdef uint32_t answers = min(load32_relaxed(&clock.answers) + 1, <uint32_t>MOST_ANSWERS)
    if answer.asked > load_relaxed(&clock.asked_at) or answer.asked > now or answer.answered < answer.received:
        return False
    took = age_ns(now - answer.asked, answer.answered - answer.received)
    error = took // 2
    store32_relaxed(&clock.answers, answers)
    if 1 < answers and took < <uint64_t>LONGEST_NS and (
            clock.measured_at == 0 or error <= clock.error + age_ns(now, clock.measured_at) // DRIFT):
        clock.measured_at, clock.error = now, error
        store_relaxed(&segment.header.ahead, answer.received - answer.asked - error)
        store_relaxed(&segment.header.ahead_error, error)
        store32_release(&segment.header.clocked, 1)         # pairs with clocked()
    if answers < AT_ONCE:
        send_question(clock, trunk, now_ns())
    return True
