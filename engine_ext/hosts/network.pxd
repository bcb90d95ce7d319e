"""The network thread, which takes in what arrives from other hosts; and what this rank sends them."""
from libc.stdint cimport uint64_t

from engine_ext.hosts.connections cimport Network

cdef int network_start(Network* network) noexcept nogil
cdef bint network_read(Network* network) noexcept nogil
cdef void network_stop_reading(Network* network) noexcept nogil
cdef void network_relay(Network* network) noexcept nogil
cdef void network_rest(Network* network) noexcept nogil
cdef uint64_t network_delayed_until(const Network* network) noexcept nogil
cdef bint network_unseen(Network* network) noexcept nogil
cdef void network_send_failure_cause(Network* network) noexcept nogil
cdef void network_leave(Network* network, uint64_t ns) noexcept nogil
