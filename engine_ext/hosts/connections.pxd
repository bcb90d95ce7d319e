"""A rank's connections to other hosts, the traffic on them, and which ranks answer."""
from libc.stdint cimport uint32_t, uint64_t

from engine_ext.data.executor cimport Executor
from engine_ext.hosts.relay cimport Relay
from engine_ext.platform.posix cimport pthread_t
from engine_ext.shared.counters cimport counters_page
from engine_ext.shared.layout cimport MAX_RANKS, engine_knobs
from engine_ext.shared.segment cimport Segment
from engine_ext.transport.lanes cimport Lane, Lanes
from engine_ext.transport.link cimport Link

cdef enum:                  # values of Network.reader
    READER_NONE
    READER_THREAD           # the network thread
    READER_CALLER           # the holder of the driver's role

cdef struct Network:
    Segment* segment        # the segment of its engine
    Network* world          # of a process set: the world's network; of the world: itself
    const engine_knobs* knobs   # knobs of the last entry that this rank has executed; in State
    uint32_t closed         # atomic: 1 once its engine has been shut down; stored with release in close
    Link* links             # malloc'ed: the links of lanes, then those of trunks
    int lane_count          # number of links of lanes
    int count               # number of links
    bint* lost              # by link: whether its end has been noticed; the reader alone
    uint64_t* ended         # by link, a bit: nothing more comes on it
    uint64_t* news          # by link, a bit: it has something to take in, or takes bytes again; the reader alone, as `ended`
    bint more               # whether a bit of `news` is set; the reader alone
    Lane* list              # malloc'ed: the lanes
    Lane** to               # by host: the lane for the slots that this rank offers to that host
    Lane** of               # by rank: the lane to it; NULL: none
    char* ahead             # malloc'ed: AHEAD bytes for what was received ahead; the reader alone
    Lanes lanes             # the transport over the lanes
    Relay relay
    bint leads              # whether this rank has trunks, or coordinates
    uint32_t reader         # atomic: READER_*, who takes in what comes
    uint32_t wanted         # atomic: 1 while the network thread wants to read and found a caller reading
    int epoll               # reports events of links to the reader
    int sleeper             # the network thread's: reports events of `epoll` and of `bell`
    int bell                # eventfd that wakes the network thread
    uint32_t sent_any         # atomic: 1: something was sent on a link since the thread last looked for acknowledgements
    uint32_t starved        # atomic: 1: the system had no memory for a call on a link, so the thread tries all links again soon
    uint32_t watching       # atomic: 1 while the thread looks regularly whether what was sent is acknowledged
    uint64_t watched_at     # its last look: nanoseconds, monotonic
    uint32_t lane_silence_ms    # milliseconds without an answer after which a lane counts as lost
    uint32_t trunk_silence_ms   # the same for a trunk
    uint32_t stop           # atomic: 1 once the thread has to end
    bint threaded           # whether `thread` has to be joined
    pthread_t thread
    int lost_peer           # a rank with a connection that has ended without FRAME_LEFT; -1: none; the reader alone
    uint32_t idle_polls     # polls of the carrier since a message last arrived
    uint64_t news_since     # since when there is news that no thread waits for: nanoseconds; 0: there is none; the reader alone
    uint64_t lost_at        # when `lost_peer` was set: nanoseconds, monotonic

cdef int connections_open(Network* network, Segment* segment, const int* lanes, int sockets, const int* trunks) noexcept nogil
cdef void connections_watch(Network* network, uint32_t silence_ms) noexcept nogil
cdef bint connections_delivered(Network* network) noexcept nogil
cdef bint connections_close(Network* network) noexcept nogil
cdef void connections_forked(Network* network) noexcept nogil

cdef struct Traffic:       # written by the holder of the driver's role alone
    int awaited             # 1 + the host of the rank that this rank waits for in its entry; 0: it does not wait
    uint64_t since          # start of that wait: nanoseconds, monotonic
    uint64_t waited         # nanoseconds for which this rank has waited in this entry, for any rank
    uint64_t sent           # bytes sent on its connections that are counted in the page
    uint64_t received       # the same of received bytes

cdef void traffic_waits(Traffic* traffic, Executor* x, const Segment* segment) noexcept nogil
cdef void traffic_waited(Traffic* traffic, const Segment* segment, counters_page* page) noexcept nogil
cdef void traffic_count(Traffic* traffic, const Network* network, counters_page* page) noexcept nogil

cdef enum:
    ALL_ANSWER = -1             # result of find_silent_rank: every rank that this one can ask has answered
    TOO_SOON = -2               # result of find_silent_rank: ask again later

cdef struct Liveness:           # times as this process sees them pass; used in the world's engine alone
    uint32_t busy               # atomic: 1 while a thread looks; that thread writes the other fields
    uint32_t number             # number of the last ping, by which answers are matched
    uint64_t begun              # atomic: when ranks were last pinged; 0: never
    uint64_t looked             # atomic: when a thread last looked for answers
    bint[MAX_RANKS] silent      # by rank: whether it was pinged and has not answered

cdef int find_silent_rank(Liveness* probe, Segment* world, Network* network, uint64_t seen, bint judges) noexcept nogil
cdef bint liveness_is_checked(const Liveness* probe, uint64_t seen) noexcept nogil
