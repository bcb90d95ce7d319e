"""Which ranks answer at all, when some rank is to be blamed for standing still."""
from libc.stdint cimport uint32_t, uint64_t

from engine_ext.hosts.connections cimport Network
from engine_ext.shared.layout cimport MAX_RANKS
from engine_ext.shared.segment cimport Segment

cdef enum:
    ALL_ANSWER = -1             # of find_silent_rank: every rank that this one can ask has answered
    TOO_SOON = -2               # ask again

cdef struct Liveness:           # times as this process has seen them pass; the world's alone
    uint32_t busy               # atomic: 1 while a thread looks
    uint32_t number             # of the ping, by which answers are known
    uint64_t begun              # atomic: when ranks were pinged; 0: they have never been
    uint64_t looked             # atomic: when somebody last looked for answers
    bint[MAX_RANKS] silent      # by rank: it was pinged, and has not answered

cdef int find_silent_rank(Liveness* probe, Segment* world, Network* network, uint64_t seen, bint judges) noexcept nogil
cdef bint liveness_is_checked(const Liveness* probe, uint64_t seen) noexcept nogil
