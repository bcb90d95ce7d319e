"""What one host tells another over a trunk: words that have changed, requests, the schedule, and why the world has ended."""
from libc.stdint cimport uint32_t, uint64_t

from engine_ext.control.coordinator cimport Coordinator
from engine_ext.control.host_clock cimport HostClock
from engine_ext.shared.layout cimport rank_page
from engine_ext.shared.segment cimport Segment
from engine_ext.transport.link cimport Link, Receiver, engine_word

cdef struct Words:          # words that wait to be sent
    engine_word* list       # malloc'ed, with room for FRAME_WORDS_MOST
    uint32_t count
    int rank                # whose; -1: the coordinator's
    Link* trunk

cdef struct Told:           # what another host has been told of a rank, where only its state is told
    uint32_t blocked
    uint32_t blocked_anywhere
    uint64_t joined
    uint64_t joined_at
    uint64_t stuck

cdef struct Trunk:           # to the leader of another host; on that leader, to the coordinator's rank
    Link* link              # NULL: there is none
    int host                # the one at the other end
    Told* told              # by rank
    uint64_t* drained       # by rank: what it has been told
    uint32_t recording      # likewise, as the next two
    uint32_t stuck
    uint32_t over
    uint64_t tail
    uint32_t verdict        # 1: it has been told why the world has ended, or what this host claims
    char* into              # malloc'ed: where the words come in

cdef struct Relay:
    Segment* segment
    Coordinator* coordinator    # on the coordinator's rank; else NULL
    Trunk* trunks             # by host on the coordinator's rank; on another leader one
    int count
    rank_page** told        # on another leader, by rank: what the coordinator has been told of its page; NULL: not of this host
    uint64_t* scanned       # atomic, by rank: sum of the words that say "look", as they were told
    uint64_t* passed        # atomic, by rank: its cursor, as it was told
    HostClock clock         # on another leader
    Receiver receiver
    bint news               # the last frames have brought something to ranks of this host

cdef bint relay_open(Relay* relay, Segment* segment, Coordinator* coordinator) noexcept nogil
cdef void relay_close(Relay* relay) noexcept nogil
cdef bint relay_unseen(const Relay* relay) noexcept nogil
cdef void relay_tell(Relay* relay) noexcept nogil
