"""A rank's connections to other hosts, what they carry, and which ranks answer."""
from libc.stdint cimport uint32_t, uint64_t

from engine_ext.data.executor cimport Executor
from engine_ext.hosts.relay cimport Relay
from engine_ext.platform.posix cimport pthread_t
from engine_ext.shared.counters cimport counters_page
from engine_ext.shared.layout cimport MAX_RANKS, engine_knobs
from engine_ext.shared.segment cimport Segment
from engine_ext.transport.lanes cimport Lane, Lanes
from engine_ext.transport.link cimport Link

cdef struct Network:
    Segment* segment        # of its engine
    Network* world          # of a process set: the world's; of the world: itself
    const engine_knobs* knobs   # those of the last entry that this rank has executed
    uint32_t closed         # atomic: 1 once its engine has been shut down
    Link* links             # lanes, then trunks
    int lane_count          # links of lanes
    int count
    bint* lost              # by link: its end has been noticed
    uint64_t* ended         # a bit for each link on which nothing more comes
    uint64_t* news          # a bit for each link that has something to take in or takes bytes again; and the bell's
    Lane* list              # the lanes
    Lane** to               # by host: the lane for what this rank offers
    Lane** of               # by rank: the lane to it
    char* ahead             # malloc'ed: AHEAD bytes of what comes, for the network thread
    Lanes lanes             # the transport
    Relay relay
    bint leads              # whether this rank has trunks, or coordinates
    int epoll
    int bell                # eventfd that wakes the thread
    uint32_t spoken         # atomic: 1: something was sent on a link since the thread last looked at what is owed
    uint32_t starved        # atomic: 1: the system had no memory for a call on a link: the thread tries all of them again soon
    uint32_t watching       # atomic: 1 while the thread looks now and then whether what was sent is acknowledged
    uint64_t watched_at     # when it last did: nanoseconds, monotonic
    uint32_t lane_silence_ms    # for which nothing may come of what was asked for on a lane
    uint32_t trunk_silence_ms   # the same on a trunk
    uint32_t stop           # atomic: 1 once the thread has to end
    bint threaded
    pthread_t thread
    int lost_peer           # a rank of which a connection has ended without FRAME_LEFT; -1: none
    uint32_t idle_polls     # of the carrier, since a message has last arrived
    uint64_t news_since     # since when there is news that nobody waits for: nanoseconds, monotonic; 0: there is none
    uint64_t lost_at        # when `lost_peer` was set: nanoseconds, monotonic

cdef int connections_open(Network* network, Segment* segment, const int* lanes, int sockets, const int* trunks) noexcept nogil
cdef void connections_watch(Network* network, uint32_t silence_ms) noexcept nogil
cdef bint connections_delivered(Network* network) noexcept nogil
cdef bint connections_close(Network* network) noexcept nogil
cdef void connections_forked(Network* network) noexcept nogil

cdef struct Traffic:       # the holder of the driver's role alone
    int awaited             # 1 + the host of the rank for which this one waits in its entry; 0: it does not wait
    uint64_t since          # since when: nanoseconds, monotonic
    uint64_t waited         # nanoseconds for which it has waited in this entry, for whomever
    uint64_t sent           # bytes of its connections that are in the page of counters
    uint64_t received       # likewise

cdef void traffic_waits(Traffic* traffic, Executor* x, const Segment* segment) noexcept nogil
cdef void traffic_waited(Traffic* traffic, const Segment* segment, counters_page* page) noexcept nogil
cdef void traffic_count(Traffic* traffic, const Network* network, counters_page* page) noexcept nogil

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
