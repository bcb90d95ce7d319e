"""What one host sends another over a trunk: words that have changed, requests, the schedule, and why the world has ended."""
from libc.stdint cimport uint32_t, uint64_t

from engine_ext.hosts.host_clock cimport HostClock
from engine_ext.shared.layout cimport rank_page
from engine_ext.shared.segment cimport Segment
from engine_ext.transport.link cimport Link, Receiver, engine_word

cdef struct Words:          # words that wait to be sent
    engine_word* list       # malloc'ed, with room for FRAME_WORDS_MOST
    uint32_t count
    int rank                # whose; -1: the coordinator's
    Link* trunk

cdef enum:                  # of what the last frames have brought
    NO_NEWS
    NEWS                    # it may be looked at later
    URGENT_NEWS

cdef struct SentState:       # state of a rank as other hosts were sent it
    uint64_t change         # number of the change with which this differed last
    uint32_t blocked
    uint32_t blocked_anywhere
    uint64_t joined
    uint64_t joined_at
    uint64_t stuck

cdef struct Trunk:           # to the leader of another host; on that leader, to the coordinator's rank
    Link* link              # NULL: there is none
    int host                # the one at the other end
    int* crew               # the ranks of that host; on the coordinator's host alone, as what follows
    int crew_size
    uint64_t version        # of the coordinator's news: what it has been sent
    uint64_t changes        # likewise: number of changes of ranks' states
    uint64_t* drained       # by rank: what it has been sent
    uint32_t recording      # likewise, as the next two
    uint32_t stuck
    uint32_t over
    uint64_t tail
    uint32_t cause_sent     # 1: it has been sent why the world has ended, or what this host claims
    char* buffer            # malloc'ed: the words that come in

cdef struct Relay:
    Segment* segment
    Trunk* trunks             # by host on the coordinator's host; on another leader one
    int count
    bint keeps              # whether any of them is this rank's; else it is the coordinator's, and others of its host have them
    uint64_t pace           # atomic: nanoseconds between two times that a leader tells what nobody waits for
    # on the coordinator's host
    uint64_t version        # increases with each change for other hosts; the next five as at the last look
    uint64_t tail           # atomic
    uint64_t drained        # atomic: of all ranks, added up
    uint64_t flags          # atomic
    uint32_t state_notices  # atomic: of the segment's header
    uint64_t changes        # number of changes of ranks' states
    SentState* states            # by rank
    # on another leader
    uint64_t sent_at        # when it last sent something: nanoseconds, monotonic
    uint64_t held           # when it has to send what it holds back: nanoseconds, monotonic; 0: it holds nothing back
    rank_page** sent        # on another leader, by rank: its page as the coordinator has it; NULL: a rank of another host
    uint64_t* scanned       # atomic, by rank: sum of the words that say "look", as they were sent
    uint64_t* passed        # atomic, by rank: its cursor, as it was sent
    HostClock clock         # on another leader
    Receiver receiver
    int news                # what the last frames have brought to ranks of this host: *_NEWS; the network thread alone

cdef bint relay_open(Relay* relay, Segment* segment) noexcept nogil
cdef void relay_close(Relay* relay) noexcept nogil
cdef bint relay_unseen(const Relay* relay) noexcept nogil
cdef void relay_tell(Relay* relay, double cycle_time_ms) noexcept nogil
