"""The relay between hosts: what one host sends another over a trunk. These are changed words, requests, the schedule, and why the
world has ended."""
from libc.stdint cimport uint32_t, uint64_t

from engine_ext.hosts.host_clock cimport HostClock
from engine_ext.shared.layout cimport rank_page
from engine_ext.shared.segment cimport Segment
from engine_ext.transport.link cimport Link, Receiver, engine_word

cdef struct Words:          # words of one page that wait to be sent
    engine_word* list       # malloc'ed, with room for FRAME_WORDS_MOST
    uint32_t count
    int rank                # the rank whose page it is; -1: the coordinator's page
    Link* trunk

cdef enum:                  # what the last frames have brought: values of Relay.news
    NO_NEWS
    NEWS                    # news that may be looked at later
    URGENT_NEWS             # news for which ranks are woken at once

cdef struct SentState:       # state of a rank as other hosts were sent it; fields as in rank_page
    uint64_t change         # number of the last change of this state
    uint32_t blocked
    uint32_t blocked_anywhere
    uint64_t joined
    uint64_t joined_at
    uint64_t waits_unnamed

cdef struct Trunk:           # connection of this host's leader with another host's leader; else with the coordinator's rank
    Link* link              # NULL: another rank of this host has this trunk
    int host                # the host at the other end
    int* crew               # malloc'ed: the ranks of that host; on the coordinator's host alone, as the fields down to `tail`
    int crew_size
    uint64_t version        # Relay.version that was sent last
    uint64_t changes        # Relay.changes that was sent last
    uint64_t* drained       # malloc'ed, by rank: coordinator_page.drained that was sent last
    uint32_t recording      # coordinator_page.recording that was sent last; likewise the next two
    uint32_t schedule_full
    uint32_t over
    uint64_t tail           # schedule words that were sent
    uint32_t cause_sent     # 1: the failure cause was sent, or this host's claim
    char* buffer            # malloc'ed: room for the words that arrive

cdef struct Relay:
    Segment* segment
    Trunk* trunks             # malloc'ed: by host on the coordinator's host; on another leader a single one
    int count                 # number of `trunks`
    bint keeps              # whether this rank has a trunk; else it is the coordinator's rank, and others of its host have them
    uint64_t pace           # atomic: nanoseconds between two times at which a leader sends news that no thread waits for
    # On the coordinator's host. `tail` to `state_notices` are values at the last look.
    uint64_t version        # number of changes that other hosts have to know
    uint64_t tail           # atomic: coordinator_page.tail
    uint64_t drained        # atomic: coordinator_page.drained, added up over ranks
    uint64_t flags          # atomic: flags_of the coordinator's page
    uint32_t state_notices  # atomic: segment_header.state_notices
    uint64_t changes        # number of changes of ranks' states
    SentState* states            # malloc'ed, by rank
    # On another leader.
    uint64_t sent_at        # when it last sent something: nanoseconds, monotonic
    uint64_t delayed_until  # when it has to send what it holds back: nanoseconds, monotonic; 0: it holds nothing back
    rank_page** sent        # by rank: its page as the coordinator has it, malloc'ed; NULL: a rank of another host
    uint64_t* scanned       # malloc'ed, atomic, by rank: arrivals + waits + request_head, as they were sent
    uint64_t* passed        # malloc'ed, atomic, by rank: its cursor, as it was sent
    # On every host.
    HostClock clock         # used on another leader alone
    Receiver receiver
    int news                # *_NEWS that the last frames have brought to ranks of this host; the reader alone

cdef bint relay_open(Relay* relay, Segment* segment) noexcept nogil
cdef void relay_close(Relay* relay) noexcept nogil
cdef bint relay_unseen(const Relay* relay) noexcept nogil
cdef void relay_tell(Relay* relay, double cycle_time_ms) noexcept nogil
