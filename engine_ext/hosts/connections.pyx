"""A rank's connections to other hosts: opened and closed, the traffic on them, and which ranks answer.

The sockets were connected and authenticated at the start.
"""
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memset

from engine_ext.data.executor cimport executor_laggard
from engine_ext.hosts.relay cimport relay_close
from engine_ext.platform.atomics cimport (
    cas32, load32_acquire, load_acquire, load_relaxed, now_ns, store32_release, store_relaxed,
)
from engine_ext.platform.clock cimport age_ns, overdue_ns
from engine_ext.platform.posix cimport close, pthread_join, write
from engine_ext.shared.counters cimport tally
from engine_ext.shared.layout cimport SLEEP_COUNT_SHIFT, SLEEP_DOORS, Status, rank_page
from engine_ext.shared.segment cimport coordinates, nearby, wake
from engine_ext.transport.lanes cimport carrying_rank, lanes_answered, lanes_close, lanes_delivered, lanes_ping
from engine_ext.transport.link cimport AHEAD, link_close, link_delivered, link_open

cdef extern from "platform/sockets.h" nogil:
    void engine_socket_keep(int fd, uint32_t silence_ms)

cdef extern from "<sys/epoll.h>" nogil:
    enum: EPOLL_CLOEXEC
    int epoll_create1(int flags)

cdef extern from "<sys/eventfd.h>" nogil:
    enum: EFD_CLOEXEC, EFD_NONBLOCK
    int eventfd(unsigned int initial, int flags)


cdef int connections_open(Network* network, Segment* segment, const int* lanes, int sockets, const int* trunks) noexcept nogil:
    """Take over connected sockets, -1 for none: `lanes` has `sockets` for each rank, `trunks` one. OK or NO_MEMORY. The sockets
    belong to the network whatever is returned, and the caller closes it."""
    cdef int most = (sockets + 1) * segment.size, k, status = Status.OK
    memset(network, 0, sizeof(Network))
    network.segment, network.lost_peer = segment, -1
    network.epoll, network.sleeper = epoll_create1(EPOLL_CLOEXEC), epoll_create1(EPOLL_CLOEXEC)
    network.bell = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)
    network.links = <Link*>calloc(most, sizeof(Link))
    network.lost = <bint*>calloc(most, sizeof(bint))
    network.news = <uint64_t*>calloc(most // 64 + 1, 8)
    network.list = <Lane*>calloc(segment.size, sizeof(Lane))
    network.to = <Lane**>calloc(segment.hosts, sizeof(Lane*))
    network.of = <Lane**>calloc(segment.size, sizeof(Lane*))
    network.ended = <uint64_t*>calloc(most // 64 + 1, 8)
    network.ahead = <char*>malloc(AHEAD)
    for k in range(sockets * segment.size):
        if lanes[k] >= 0:
            status |= add_link(network, lanes[k], k // sockets)
    network.lane_count = network.count
    for k in range(segment.size):
        if trunks[k] >= 0:
            status |= add_link(network, trunks[k], k)
    if (network.epoll < 0 or network.sleeper < 0 or network.bell < 0 or network.news == NULL or network.list == NULL
            or network.to == NULL or network.of == NULL or network.ended == NULL or network.ahead == NULL or status != Status.OK):
        return Status.NO_MEMORY
    for k in range(network.lane_count // sockets):
        add_lane(network, segment, k, sockets)
    network.leads = network.count > network.lane_count or coordinates(segment)
    return Status.OK


cdef void add_lane(Network* network, const Segment* segment, int number, int sockets) noexcept nogil:
    """Make a lane of the next `sockets` links."""
    cdef Lane* lane = &network.list[number]
    cdef int peer = network.links[number * sockets].peer
    lane.links, lane.count = &network.links[number * sockets], sockets
    lane.carries = carrying_rank(segment, peer, segment.host_of[segment.rank]) == segment.rank
    network.of[peer] = lane
    if carrying_rank(segment, segment.rank, segment.host_of[peer]) == peer:
        network.to[segment.host_of[peer]] = lane


cdef void connections_watch(Network* network, uint32_t silence_ms) noexcept nogil:
    """Have the kernel end idle connections whose other side has not answered for `silence_ms`; the network thread watches those
    on which something was sent. Lanes, and a process set's trunks, have half as much more time: rank 0's host reports a lost host
    over the world's trunks before they do."""
    cdef bint of_world = network.world == network
    cdef int k
    network.lane_silence_ms = silence_ms + silence_ms // 2
    network.trunk_silence_ms = silence_ms if of_world else network.lane_silence_ms
    for k in range(network.lane_count, network.count):
        engine_socket_keep(network.links[k].fd, network.trunk_silence_ms)
    for k in range(network.lane_count if of_world else 0):
        if k % network.list[0].count == 0:      # the other sockets of a lane take the same route
            engine_socket_keep(network.links[k].fd, network.lane_silence_ms)


cdef int add_link(Network* network, int fd, int peer) noexcept nogil:
    """Add a link over `fd` to rank `peer`. OK, or NO_MEMORY and `fd` is closed."""
    if network.links == NULL or network.lost == NULL:
        close(fd)
        return Status.NO_MEMORY
    link_open(&network.links[network.count], fd, peer, &network.sent_any, &network.starved)
    network.count += 1
    return Status.OK


cdef bint connections_delivered(Network* network) noexcept nogil:
    """Return whether all that was sent has reached the other sides. After a failure the culprit's host, and the carrier, are left
    out: nobody may be there to receive it."""
    cdef const Segment* segment = network.lanes.memory.segment
    cdef uint64_t word = load_acquire(segment.abort)
    cdef int gone = segment.world.host_of[(word & 0xFFFF) - 1] if word & 0xFFFF else -1, k
    for k in range(network.count):
        if segment.world.host_of[segment.numbers[network.links[k].peer]] != gone and not link_delivered(&network.links[k]):
            return False
    return word != 0 or lanes_delivered(&network.lanes)


cdef bint connections_close(Network* network) noexcept nogil:
    """Close all connections and free their memory. False: the carrier may still write to the slots of ranks on other hosts."""
    cdef Network closed
    cdef uint64_t one = 1
    cdef int k
    cdef bint over
    if network.threaded:
        store32_release(&network.stop, 1)
        write(network.bell, &one, 8)
        pthread_join(network.thread, NULL)
    over = lanes_close(&network.lanes)
    for k in range(network.count):
        link_close(&network.links[k])
    if network.relay.segment != NULL:
        relay_close(&network.relay)
    if network.epoll >= 0:
        close(network.epoll)
    if network.sleeper >= 0:
        close(network.sleeper)
    if network.bell >= 0:
        close(network.bell)
    free(network.links)
    free(network.lost)
    free(network.news)
    free(network.list)
    free(network.to)
    free(network.of)
    free(network.ended)
    free(network.ahead)
    memset(&closed, 0, sizeof(Network))
    closed.epoll = closed.sleeper = closed.bell = -1        # it may be closed again
    closed.closed = True
    network[0] = closed                     # network threads of process sets still look, and never see it open again
    return over


cdef void connections_forked(Network* network) noexcept nogil:
    """Close the descriptors of the connections in a forked child: while they are open there, the other sides do not see their
    end."""
    cdef int k
    for k in range(network.count):
        close(network.links[k].fd)
    close(network.epoll)
    close(network.sleeper)
    close(network.bell)
    network.count = network.lane_count = 0          # the child's own children may have other files under these numbers
    network.epoll = network.sleeper = network.bell = -1


# ---- traffic ----------------------------------------------------------------------------------------------------------------

# Traffic: how long this rank's entries wait for ranks of other hosts, and what its connections carry.
#
# A rank that submits late keeps others waiting before an entry begins: that is its lag. Within an entry ranks wait for data. If
# the data has to come from another host, the time is counted for that host. So a slow connection can be told from a slow rank.

cdef void traffic_waits(Traffic* traffic, Executor* x, const Segment* segment) noexcept nogil:
    """Note that the entry in progress cannot go on now."""
    cdef int awaited = executor_laggard(x, True)
    traffic.awaited, traffic.since = 1 + segment.host_of[awaited if awaited >= 0 else segment.rank], now_ns()


cdef void traffic_waited(Traffic* traffic, const Segment* segment, counters_page* page) noexcept nogil:
    """Note that the entry may go on, or has ended. `page`: NULL if nothing is counted."""
    cdef uint64_t ns
    if traffic.awaited == 0:
        return
    ns = age_ns(now_ns(), traffic.since)
    traffic.waited += ns
    if page != NULL and traffic.awaited - 1 != segment.host_of[segment.rank]:
        tally(&page.crossing_ns[host_in_world(segment, traffic.awaited - 1)], ns)
    traffic.awaited = 0


cdef inline int host_in_world(const Segment* segment, int host) noexcept nogil:
    """Return the world's number of a host of this engine's ranks."""
    cdef int r
    for r in range(segment.size):
        if segment.host_of[r] == host:
            return segment.world.host_of[segment.numbers[r]]
    return 0


cdef void traffic_count(Traffic* traffic, const Network* network, counters_page* page) noexcept nogil:
    """Count the bytes that the connections have carried since the last call."""
    cdef uint64_t sent = 0, received = 0
    cdef int k
    for k in range(network.count):
        sent += load_relaxed(&network.links[k].out_bytes)
        received += load_relaxed(&network.links[k].in_bytes)
    tally(page.network_sent, sent - traffic.sent)
    tally(page.network_received, received - traffic.received)
    traffic.sent, traffic.received = sent, received


# ---- liveness ---------------------------------------------------------------------------------------------------------------

# Liveness: which ranks answer at all, when some rank of a job on several hosts is to be blamed for standing still.
#
# News of a rank on another host come through processes of others: the rank that carries for it, and the leaders. When one of
# these is stopped, the ranks behind it seem to stand still as well, and look as if they were to blame. So a rank that is about to
# blame another first pings the ranks that it can ask by itself. These are the ranks of its own host, whose drivers wake and sleep
# again when their doors are rung, and the ranks at the other ends of its lanes, whose network threads answer. A stopped process
# does neither.
#
# A rank that has not answered for a while is the one to blame. If all answer, others may still know of one that this rank cannot
# ask, and get a moment to report it.

cdef enum:
    SILENCE_NS = 2000000000     # longest time for which a running process may leave a ping unanswered
    OTHERS_NS = 1000000000      # more time if all answer, so that ranks that can ask others come first
    JUDGE_NS = 500000000        # more time for a rank that does not judge: rank 0 sees all names, and knows who waits for whom
    OVER_NS = 1000000000        # age of the last look after which a new round of pings begins: the blame is for something else


cdef bint liveness_is_checked(const Liveness* probe, uint64_t seen) noexcept nogil:
    """Return whether a round of pings is under way."""
    return load_relaxed(&probe.begun) != 0 and not overdue_ns(seen, load_relaxed(&probe.looked), OVER_NS)


cdef void ping_ranks(Liveness* probe, Segment* world, Network* network) noexcept nogil:
    """Ping all ranks that this one can ask."""
    cdef int r
    probe.number += 1
    for r in range(world.size):
        probe.silent[r] = r != world.rank and not load32_acquire(&world.pages[r].left)
        if probe.silent[r] and nearby(world, r):
            wake(world, r, 0)
        elif probe.silent[r]:
            probe.silent[r] = lanes_ping(&network.lanes, r, probe.number)


cdef bint sleeps_again(const rank_page* page) noexcept nogil:
    """Return whether a rank's driver has announced a sleep that no ring has ended yet: it has then noticed the last ring."""
    cdef uint32_t asleep = load32_acquire(&page.asleep), door = asleep & SLEEP_DOORS
    return door != 0 and (load32_acquire(&page.door[door]) ^ asleep >> SLEEP_COUNT_SHIFT) << SLEEP_COUNT_SHIFT == 0


cdef int first_silent(Liveness* probe, Segment* world, Network* network) noexcept nogil:
    """Note answers. Return the first rank that has not answered, or ALL_ANSWER."""
    cdef int first = ALL_ANSWER, r
    for r in range(world.size):
        if not probe.silent[r]:
            continue
        if load32_acquire(&world.pages[r].left):
            probe.silent[r] = False
        elif nearby(world, r):
            probe.silent[r] = not sleeps_again(world.pages[r])
        else:
            probe.silent[r] = not lanes_answered(&network.lanes, r, probe.number)
        if probe.silent[r] and first < 0:
            first = r
    return first


cdef int find_silent_rank(Liveness* probe, Segment* world, Network* network, uint64_t seen, bint judges) noexcept nogil:
    """Return a rank that does not answer, ALL_ANSWER, or TOO_SOON. The first call of several pings the ranks."""
    cdef int silent = TOO_SOON
    cdef uint64_t patience = SILENCE_NS
    if not cas32(&probe.busy, 0, 1):
        return TOO_SOON
    if not liveness_is_checked(probe, seen):
        ping_ranks(probe, world, network)
        store_relaxed(&probe.begun, seen)
    else:
        silent = first_silent(probe, world, network)
        if silent == ALL_ANSWER:
            patience += OTHERS_NS
            if not judges:
                patience += JUDGE_NS
        if not overdue_ns(seen, load_relaxed(&probe.begun), patience):
            silent = TOO_SOON
    store_relaxed(&probe.looked, seen)
    store32_release(&probe.busy, 0)
    return silent
