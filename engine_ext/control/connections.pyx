"""Open and close a rank's connections to other hosts: sockets that were connected and proven at the start."""
from libc.stdint cimport uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from engine_ext.control.relay cimport relay_close
from engine_ext.platform.atomics cimport store32_release
from engine_ext.platform.posix cimport close, pthread_join, write
from engine_ext.shared.layout cimport Status
from engine_ext.transport.lanes cimport carrier
from engine_ext.transport.link cimport link_close, link_idle, link_open

cdef extern from "<sys/epoll.h>" nogil:
    enum: EPOLL_CLOEXEC
    int epoll_create1(int flags)

cdef extern from "<sys/eventfd.h>" nogil:
    enum: EFD_CLOEXEC, EFD_NONBLOCK
    int eventfd(unsigned int initial, int flags)


cdef int connections_open(Network* network, Segment* segment, const int* lanes, const int* trunks) noexcept nogil:
    """Take over connected sockets: `lanes` by rank, `trunks` by host, -1 for none. OK or NO_MEMORY. The caller closes it."""
    cdef int r, h, k, status = Status.OK
    cdef Link* link
    memset(network, 0, sizeof(Network))
    network.suspect = -1
    network.epoll, network.bell = epoll_create1(EPOLL_CLOEXEC), eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)
    network.links = <Link*>calloc(segment.size + segment.hosts, sizeof(Link))
    network.lost = <bint*>calloc(segment.size + segment.hosts, sizeof(bint))
    network.news = <uint64_t*>calloc((segment.size + segment.hosts) // 64 + 1, 8)
    network.to = <Link**>calloc(segment.hosts, sizeof(Link*))
    for r in range(segment.size):
        if lanes[r] >= 0:
            status |= add_link(network, lanes[r], r)
    network.lane_count = network.count
    for h in range(segment.hosts):
        if trunks[h] >= 0:
            status |= add_link(network, trunks[h], leader_of(segment, h))
    if network.epoll < 0 or network.bell < 0 or network.news == NULL or network.to == NULL or status != Status.OK:
        return Status.NO_MEMORY
    for k in range(network.lane_count):
        link = &network.links[k]
        h = segment.host_of[link.peer]
        if carrier(segment, segment.rank, h) == link.peer:
            network.to[h] = link
    network.leads = network.count > network.lane_count
    return Status.OK


cdef int add_link(Network* network, int fd, int peer) noexcept nogil:
    if network.links == NULL or network.lost == NULL:
        close(fd)
        return Status.NO_MEMORY
    link_open(&network.links[network.count], fd, peer)
    network.count += 1
    return Status.OK


cdef int leader_of(const Segment* segment, int host) noexcept nogil:
    cdef int r
    for r in range(segment.size):
        if segment.host_of[r] == host:
            return r
    return -1


cdef bint connections_sent(Network* network) noexcept nogil:
    """Whether all that was to be sent has been taken by the system."""
    cdef int k
    for k in range(network.count):
        if not link_idle(&network.links[k]):
            return False
    return True


cdef void connections_close(Network* network) noexcept nogil:
    cdef uint64_t one = 1
    cdef int k
    if network.threaded:
        store32_release(&network.stop, 1)
        write(network.bell, &one, 8)
        pthread_join(network.thread, NULL)
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
    free(network.to)
    memset(network, 0, sizeof(Network))
    network.epoll = network.bell = -1       # it may be closed once more


cdef void connections_forked(Network* network) noexcept nogil:
    """In a forked child: let go of the connections, whose ends mean something."""
    cdef int k
    for k in range(network.count):
        close(network.links[k].fd)
    network.count = network.lane_count = 0          # its own children have other files of these numbers
