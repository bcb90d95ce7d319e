"""Connections of a rank to other hosts: opened and closed, what they carry, and which ranks answer.

They were connected and proven at the start.
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
    """Take over connected sockets, -1 for none: of lanes `sockets` for each rank, of trunks one. OK or NO_MEMORY. They are the
    caller's no more, whatever is returned; it closes the network."""
    cdef int most = (sockets + 1) * segment.size, k, status = Status.OK
    memset(network, 0, sizeof(Network))
    network.segment, network.lost_peer = segment, -1
    network.epoll, network.bell = epoll_create1(EPOLL_CLOEXEC), eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)
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
    if (network.epoll < 0 or network.bell < 0 or network.news == NULL or network.list == NULL or network.to == NULL
            or network.of == NULL or network.ended == NULL or network.ahead == NULL or status != Status.OK):
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
    """Have the kernel end connections that are idle, and whose other side has not answered for so long; those on which
    something was sent the network thread looks at. Lanes, and a process set's trunks, have half as much more: that a host is
    gone is told by rank 0's host, over the world's trunks, before they say so."""
    cdef bint of_world = network.world == network
    cdef int k
    network.lane_silence_ms = silence_ms + silence_ms // 2
    network.trunk_silence_ms = silence_ms if of_world else network.lane_silence_ms
    for k in range(network.lane_count, network.count):
        engine_socket_keep(network.links[k].fd, network.trunk_silence_ms)
    for k in range(network.lane_count if of_world else 0):
        if k % network.list[0].count == 0:      # the others of a lane go the same way
            engine_socket_keep(network.links[k].fd, network.lane_silence_ms)


cdef int add_link(Network* network, int fd, int peer) noexcept nogil:
    if network.links == NULL or network.lost == NULL:
        close(fd)
        return Status.NO_MEMORY
    link_open(&network.links[network.count], fd, peer, &network.spoken, &network.starved)
    network.count += 1
    return Status.OK


cdef bint connections_delivered(Network* network) noexcept nogil:
    """Whether all that was to be sent has come to the other sides. After a failure nobody may be there to receive it where the
    culprit's host is, or for the carrier."""
    cdef const Segment* segment = network.lanes.memory.segment
    cdef uint64_t word = load_acquire(segment.abort)
    cdef int gone = segment.world.host_of[(word & 0xFFFF) - 1] if word & 0xFFFF else -1, k
    for k in range(network.count):
        if segment.world.host_of[segment.numbers[network.links[k].peer]] != gone and not link_delivered(&network.links[k]):
            return False
    return word != 0 or lanes_delivered(&network.lanes)


cdef bint connections_close(Network* network) noexcept nogil:
    """False: the carrier may still write to the slots of ranks on other hosts."""
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
    closed.epoll = closed.bell = -1         # it may be closed once more
    closed.closed = True
    network[0] = closed                     # the network threads of process sets still look, and never see it open again
    return over


cdef void connections_forked(Network* network) noexcept nogil:
    """In a forked child: let go of the connections, whose ends mean something."""
    cdef int k
    for k in range(network.count):
        close(network.links[k].fd)
    close(network.epoll)
    close(network.bell)
    network.count = network.lane_count = 0          # its own children have other files of these numbers
    network.epoll = network.bell = -1


# ---- traffic ----------------------------------------------------------------------------------------------------------------

# How long this rank's entries wait for ranks of other hosts, and what its connections carry.
#
# A rank that submits late keeps others waiting before an entry begins, which is its lag. What they wait for within an entry is
# data: where that has to come from another host, it is counted for that host. So a slow connection is told from a slow rank.

cdef void traffic_waits(Traffic* traffic, Executor* x, const Segment* segment) noexcept nogil:
    """The entry in progress cannot go on now."""
    cdef int awaited = executor_laggard(x, True)
    traffic.awaited, traffic.since = 1 + segment.host_of[awaited if awaited >= 0 else segment.rank], now_ns()


cdef void traffic_waited(Traffic* traffic, const Segment* segment, counters_page* page) noexcept nogil:
    """It may go on, or has ended. `page`: NULL if nothing is counted."""
    cdef uint64_t ns
    if traffic.awaited == 0:
        return
    ns = age_ns(now_ns(), traffic.since)
    traffic.waited += ns
    if page != NULL and traffic.awaited - 1 != segment.host_of[segment.rank]:
        tally(&page.crossing_ns[host_in_world(segment, traffic.awaited - 1)], ns)
    traffic.awaited = 0


cdef inline int host_in_world(const Segment* segment, int host) noexcept nogil:
    """What the world calls a host of this engine's ranks."""
    cdef int r
    for r in range(segment.size):
        if segment.host_of[r] == host:
            return segment.world.host_of[segment.numbers[r]]
    return 0


cdef void traffic_count(Traffic* traffic, const Network* network, counters_page* page) noexcept nogil:
    """Count what the connections have carried since the last time."""
    cdef uint64_t sent = 0, received = 0
    cdef int k
    for k in range(network.count):
        sent += load_relaxed(&network.links[k].out_bytes)
        received += load_relaxed(&network.links[k].in_bytes)
    tally(page.network_sent, sent - traffic.sent)
    tally(page.network_received, received - traffic.received)
    traffic.sent, traffic.received = sent, received


# ---- liveness ---------------------------------------------------------------------------------------------------------------

# Which ranks answer at all, when some rank of a job on several hosts is to be blamed for standing still.
#
# News of a rank on another host come through the processes of others: whoever carries for it, and the leaders. When one of these
# is stopped, those behind it seem to stand still as well, and look as if they were to blame. So whoever is about to blame a rank
# first has those answer that it can ask by itself: the ranks of its own host, whose drivers wake and go to sleep again when their
# doors are rung, and the ranks that it has lanes with, whose network threads answer. A process that is stopped does neither.
#
# Who has not answered for a while is the one to name. If all answer, others may still know of one that this rank cannot ask, and
# have a moment to say so.

cdef enum:
    SILENCE_NS = 2000000000     # for which a process that runs may leave a ping unanswered
    OTHERS_NS = 1000000000      # more, for which those who can ask others come first
    JUDGE_NS = 500000000        # more, for which rank 0 does that sees the names of all: it knows who waits for whom
    OVER_NS = 1000000000        # since the last look: whoever is blamed now is so for something else


cdef bint liveness_is_checked(const Liveness* probe, uint64_t seen) noexcept nogil:
    """Whether somebody waits for answers."""
    return load_relaxed(&probe.begun) != 0 and not overdue_ns(seen, load_relaxed(&probe.looked), OVER_NS)


cdef void ping_ranks(Liveness* probe, Segment* world, Network* network) noexcept nogil:
    """Ask all ranks that this one can ask."""
    cdef int r
    probe.number += 1
    for r in range(world.size):
        probe.silent[r] = r != world.rank and not load32_acquire(&world.pages[r].left)
        if probe.silent[r] and nearby(world, r):
            wake(world, r, 0)
        elif probe.silent[r]:
            probe.silent[r] = lanes_ping(&network.lanes, r, probe.number)


cdef bint sleeps_again(const rank_page* page) noexcept nogil:
    """Whether whoever drives has announced a sleep that nobody has ended yet: it has heard the last ring."""
    cdef uint32_t asleep = load32_acquire(&page.asleep), door = asleep & SLEEP_DOORS
    return door != 0 and (load32_acquire(&page.door[door]) ^ asleep >> SLEEP_COUNT_SHIFT) << SLEEP_COUNT_SHIFT == 0


cdef int first_silent(Liveness* probe, Segment* world, Network* network) noexcept nogil:
    """Take note of answers; the first rank that has not answered, or ALL_ANSWER."""
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
    """A rank that does not answer, ALL_ANSWER, or TOO_SOON. The first of several looks pings them."""
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
