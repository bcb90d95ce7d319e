"""The transport of ranks on one host: slots and stage counters in the segment that all of them map."""
from libc.stdint cimport uint64_t

from engine_ext.shared.segment cimport Segment
from engine_ext.transport.transport cimport Progress, Transport

cdef struct SharedMemory:
    Transport functions         # first: a pointer to the one is a pointer to the other
    Segment* segment
    uint64_t[3] known           # by stage: the least number of chunks that any rank has passed, as last seen

cdef Transport* shared_memory_open(SharedMemory* t, Segment* segment) noexcept nogil
cdef void shared_memory_publish(Segment* segment, int rank, const Progress* passed) noexcept nogil
