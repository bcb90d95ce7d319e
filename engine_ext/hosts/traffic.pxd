"""How long this rank's entries wait for ranks of other hosts, and what its connections carry."""
from libc.stdint cimport uint64_t

from engine_ext.data.executor cimport Executor
from engine_ext.hosts.connections cimport Network
from engine_ext.shared.counters cimport counters_page
from engine_ext.shared.segment cimport Segment

cdef struct Traffic:       # the holder of the driver's role alone
    int awaited             # 1 + the host of the rank for which this one waits in its entry; 0: it does not wait
    uint64_t since          # since when: nanoseconds, monotonic
    uint64_t waited         # nanoseconds for which it has waited in this entry, for whomever
    uint64_t sent           # bytes of its connections that are in the page of counters
    uint64_t received       # likewise

cdef void traffic_waits(Traffic* traffic, Executor* x, const Segment* segment) noexcept nogil
cdef void traffic_waited(Traffic* traffic, const Segment* segment, counters_page* page) noexcept nogil
cdef void traffic_count(Traffic* traffic, const Network* network, counters_page* page) noexcept nogil
