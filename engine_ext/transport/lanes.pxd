"""The transport of ranks on several hosts: shared memory on each, and lanes between them."""
from libc.stdint cimport uint64_t

from engine_ext.shared.segment cimport Segment
from engine_ext.transport.link cimport Link, Receiver
from engine_ext.transport.shm cimport SharedMemory
from engine_ext.transport.transport cimport Transport

cdef struct Lanes:
    SharedMemory memory     # first: a pointer to the one is a pointer to the other
    Link** to               # by host: the lane to the rank that carries for it what this rank offers; NULL: this host
    Receiver receiver       # of what comes on any lane

cdef Transport* lanes_open(Lanes* t, Segment* segment, Link** to) noexcept nogil
cdef int carrier(const Segment* segment, int rank, int host) noexcept nogil
