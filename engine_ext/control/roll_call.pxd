"""Which ranks answer at all, when some rank is to be blamed for standing still."""
from libc.stdint cimport uint32_t, uint64_t

from engine_ext.control.connections cimport Network
from engine_ext.shared.layout cimport MAX_RANKS
from engine_ext.shared.segment cimport Segment

cdef enum:
    ALL_ANSWER = -1             # of roll_call: every rank that this one can ask has answered
    TOO_SOON = -2               # ask again

cdef struct RollCall:           # times as this process has seen them pass; the world's alone
    uint32_t busy               # atomic: 1 while a thread looks
    uint32_t number             # of the call, by which answers are known
    uint64_t begun              # atomic: when ranks were called; 0: they have never been
    uint64_t looked             # atomic: when somebody last looked for answers
    bint[MAX_RANKS] silent      # by rank: it was called, and has not answered

cdef int roll_call(RollCall* roll, Segment* world, Network* network, uint64_t seen, bint judges) noexcept nogil
cdef bint roll_call_open(const RollCall* roll, uint64_t seen) noexcept nogil
