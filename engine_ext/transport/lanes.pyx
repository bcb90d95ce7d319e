"""The transport of ranks on several hosts (transport.pxd says what it promises).

Every host has a slot and a page for each rank of the world. Those of ranks on other hosts are *shadows*: what such a rank offers
comes over a lane, and the network thread of the rank that *carries* it writes it to the same place of the shadow slot, and then
how far that rank is to the shadow page. So whoever waits and reads does so as on one host, and every promise follows from the
order of bytes on one connection: what a rank wrote to its slot comes before the news that it did.

Nothing has to be said about room. A rank writes chunk n + SLOTS over chunk n only when every rank has copied chunk n: then it has
been received on every host, and so has been sent.
"""
from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memset

from engine_ext.platform.atomics cimport add32, load_relaxed, store32_release
from engine_ext.shared.layout cimport SLOT_BYTES, segment_slot
from engine_ext.shared.segment cimport nearby, wake, wake_others
from engine_ext.transport.link cimport FRAME_LEFT, FRAME_PROGRESS, FRAME_SLOT, engine_frame, link_flush, link_queue
from engine_ext.transport.shm cimport shared_memory_open, shared_memory_tell
from engine_ext.transport.transport cimport Progress


cdef Transport* lanes_open(Lanes* t, Segment* segment, Link** to) noexcept nogil:
    """Fill in a transport over a mapped segment and open lanes, which stay their caller's."""
    cdef Transport* functions = shared_memory_open(&t.memory, segment)
    t.to = to
    functions.publish, functions.offer = publish, offer
    t.receiver.into, t.receiver.done, t.receiver.owner = into, done, t
    return functions


cdef int carrier(const Segment* segment, int rank, int host) noexcept nogil:
    """The rank of `host` that receives what `rank`, of another host, offers: the one of the same place, as far as there are as
    many."""
    cdef int place = 0, crew = 0, r
    for r in range(segment.size):
        place += r < rank and segment.host_of[r] == segment.host_of[rank]
        crew += segment.host_of[r] == host
    place %= crew
    for r in range(segment.size):
        if segment.host_of[r] == host:
            if place == 0:
                return r
            place -= 1
    return -1


cdef void offer_to_host(Lanes* t, int host, uint64_t n, uint64_t begin, uint64_t nbytes) noexcept nogil:
    cdef engine_frame frame
    memset(&frame, 0, sizeof(frame))
    frame.type, frame.bytes, frame.offset, frame.position = FRAME_SLOT, <uint32_t>nbytes, <uint32_t>begin, n
    link_queue(t.to[host], &frame, segment_slot(t.memory.segment.header, t.memory.segment.rank, n) + begin)


cdef void offer(Transport* transport, int rank, uint64_t n, uint64_t begin, uint64_t nbytes) noexcept nogil:
    cdef Lanes* t = <Lanes*>transport
    cdef Segment* segment = t.memory.segment
    cdef int host
    if nbytes == 0:
        return
    if rank >= 0:
        if not nearby(segment, rank):
            offer_to_host(t, segment.host_of[rank], n, begin, nbytes)
        return
    for host in range(segment.hosts):
        if t.to[host] != NULL:
            offer_to_host(t, host, n, begin, nbytes)


cdef void publish(Transport* transport, const Progress* mine) noexcept nogil:
    """On this host first; on others behind what was offered."""
    cdef Lanes* t = <Lanes*>transport
    cdef Segment* segment = t.memory.segment
    cdef engine_frame frame
    cdef int host
    shared_memory_tell(segment, segment.rank, mine)
    memset(&frame, 0, sizeof(frame))
    frame.type, frame.bytes = FRAME_PROGRESS, sizeof(Progress)
    for host in range(segment.hosts):
        if t.to[host] != NULL:
            link_queue(t.to[host], &frame, <const char*>mine)
            link_flush(t.to[host])


# ---- what comes: the network thread alone ------------------------------------------------------------------------------------

cdef inline bint carries(const Segment* segment, int peer) noexcept nogil:
    """Whether this rank receives for its host what `peer` offers. Other lanes of `peer` tell nothing of how far it is."""
    return carrier(segment, peer, segment.host_of[segment.rank]) == segment.rank


cdef char* into(void* owner, Link* link, const engine_frame* frame) noexcept nogil:
    cdef Segment* segment = (<Lanes*>owner).memory.segment
    if frame.type == FRAME_LEFT and frame.bytes == 0:
        return <char*>link.small
    if not carries(segment, link.peer):
        return NULL
    if frame.type == FRAME_PROGRESS and frame.bytes == sizeof(Progress):
        return <char*>link.small
    if (frame.type == FRAME_SLOT and <uint64_t>frame.offset + frame.bytes <= SLOT_BYTES
            and frame.position >= load_relaxed(&segment.pages[link.peer].copied)):
        return segment_slot(segment.header, link.peer, frame.position) + frame.offset
    return NULL


cdef bint done(void* owner, Link* link, const engine_frame* frame) noexcept nogil:
    cdef Segment* segment = (<Lanes*>owner).memory.segment
    cdef const Progress* passed = <const Progress*>link.small
    if frame.type == FRAME_PROGRESS:
        if (passed.packed < load_relaxed(&segment.pages[link.peer].packed)
                or passed.reduced < load_relaxed(&segment.pages[link.peer].reduced)
                or passed.copied < load_relaxed(&segment.pages[link.peer].copied)):
            return False
        shared_memory_tell(segment, link.peer, passed)
    elif frame.type == FRAME_LEFT:
        link.farewell = True
        if not carries(segment, link.peer):
            return True
        store32_release(&segment.pages[link.peer].left, 1)      # after the last chunk that it has passed
        add32(&segment.header.departures, 1)
        wake_others(segment, 0)
        wake(segment, segment.rank, 0)
    return True
