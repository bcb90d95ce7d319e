"""How long this rank's entries wait for ranks of other hosts, and what its connections carry.

A rank that submits late keeps others waiting before an entry begins, which is its lag. What they wait for within an entry is
data: where that has to come from another host, it is counted for that host. So a slow connection is told from a slow rank.
"""
from libc.stdint cimport uint64_t

from engine_ext.data.executor cimport executor_laggard
from engine_ext.platform.atomics cimport load_relaxed, now_ns
from engine_ext.platform.clock cimport age_ns
from engine_ext.shared.counters cimport tally


cdef void traffic_waits(Traffic* traffic, Executor* x, const Segment* segment) noexcept nogil:
    """The entry in progress cannot go on now."""
    cdef int awaited = executor_laggard(x, True)
    traffic.awaited, traffic.since = 1 + segment.host_of[awaited if awaited >= 0 else segment.rank], now_ns()


cdef void traffic_waited(Traffic* traffic, const Segment* segment, counters_page* page) noexcept nogil:
    """It may go on, or has ended. `page`: NULL if nothing is counted."""
    cdef uint64_t ns
    if traffic.awaited == 0:
        return
    ns = age_ns(now_ns(), traffic.since)
    traffic.waited += ns
    if page != NULL and traffic.awaited - 1 != segment.host_of[segment.rank]:
        tally(&page.crossing_ns[host_in_world(segment, traffic.awaited - 1)], ns)
    traffic.awaited = 0


cdef inline int host_in_world(const Segment* segment, int host) noexcept nogil:
    """What the world calls a host of this engine's ranks."""
    cdef int r
    for r in range(segment.size):
        if segment.host_of[r] == host:
            return segment.world.host_of[segment.numbers[r]]
    return 0


cdef void traffic_count(Traffic* traffic, const Network* network, counters_page* page) noexcept nogil:
    """Count what the connections have carried since the last time."""
    cdef uint64_t sent = 0, received = 0
    cdef int k
    for k in range(network.count):
        sent += load_relaxed(&network.links[k].out_bytes)
        received += load_relaxed(&network.links[k].in_bytes)
    tally(page.network_sent, sent - traffic.sent)
    tally(page.network_received, received - traffic.received)
    traffic.sent, traffic.received = sent, received
