"""The transport of ranks on several hosts (transport.pxd says what it promises).

Every host has a slot and a page for each rank of the world. Those of ranks on other hosts are *shadows*: what such a rank offers
comes over a lane, and the network thread of the rank that *carries* it writes it to the same place of the shadow slot, and then
how far that rank is to the shadow page. So whoever waits and reads does so as on one host, and every promise follows from the
order of bytes on one connection: what a rank wrote to its slot comes before the news that it did.

A lane may have several connections, since one does not fill a fast network. Large offers are cut, and each connection carries a
part. How far the sender is goes over those that have carried bytes since the last time, and over the first in any case, which
says which the others are. So how many are used is the sender's affair, at any time, and what is small costs one frame, however
many there are. A rank counts as far as it is by all connections on which bytes are due.

A lane may also have MPI beside its connection (mpi.pyx), which then takes what is large. The connection says what comes, and how
far the peer is behind it; so MPI, on which nobody can sleep, is asked while something is under way and not else, and a connection
that ends tells of a peer that is gone, as ever.

Nothing has to be said about room. A rank writes chunk n + SLOTS over chunk n only when every rank has copied chunk n: then it has
been received on every host, and so has been sent.
"""
from libc.errno cimport EIO
from libc.stdint cimport int32_t, uint32_t, uint64_t
from libc.stdlib cimport malloc
from libc.string cimport memcpy, memset

from engine_ext.platform.atomics cimport (
    add32, cas32, load32_acquire, load32_relaxed, load_relaxed, store32_relaxed, store32_release,
)
from engine_ext.platform.posix cimport write
from engine_ext.shared.crews cimport Crews, crew_size, member
from engine_ext.shared.layout cimport CAUSE_NONE, CAUSES, REASON_BYTES, SLOT_BYTES, rank_page, segment_slot
from engine_ext.shared.segment cimport nearby, wake, wake_others
from engine_ext.transport.link cimport (
    FRAME_PING, FRAME_PONG, FRAME_LEFT, FRAME_MESSAGE, FRAME_PROGRESS, FRAME_SLOT, FRAME_VERDICT, OPEN, engine_frame,
    engine_verdict, link_bid_farewell, link_flush, link_give, link_queue, link_state,
)
from engine_ext.transport.mpi cimport (
    SUMMING_FAILED, SUMMING_NOTHING, courier_arrived, courier_busy, courier_receive, courier_send, courier_sent, courier_tell,
    engine_mpi, summing_begin, summing_busy, summing_close, summing_look, summing_room,
)
from engine_ext.transport.shm cimport shared_memory_open, shared_memory_tell
from engine_ext.transport.transport cimport Progress

cdef uint64_t ONE = 1

cdef enum:
    PART_BYTES = 64 << 10       # least part of a slot for which another connection is used
    LINE = 64                   # parts begin where lines of the cache do
    MESSAGE_BYTES = 16 << 10    # least part of a slot that goes over MPI: below it, a connection takes less time


cdef Transport* lanes_open(Lanes* t, Segment* segment, Lane** to, Lane** of, int bell) noexcept nogil:
    """Fill in a transport over a mapped segment and open lanes, which stay their caller's."""
    cdef Transport* functions = shared_memory_open(&t.memory, segment)
    t.to, t.of, t.sockets, t.bell = to, of, MAX_SOCKETS, bell
    t.posted, t.dozing = False, 0
    memset(&t.summing, 0, sizeof(t.summing))
    functions.publish, functions.offer = publish, offer
    t.receiver.into, t.receiver.done, t.receiver.owner = into, done, t
    return functions


cdef void lanes_sum(Lanes* t, const engine_mpi* library) noexcept nogil:
    """From now on this transport can sum. For the world, on all ranks, before anything is submitted."""
    cdef Transport* functions = &t.memory.functions
    t.summing.library = library
    t.memory.segment.crews.summing = True
    functions.sum_room, functions.sum, functions.summed = sum_room, sum_all, summed


cdef void lanes_close(Lanes* t) noexcept nogil:
    """After the network thread has ended."""
    if t.summing.library != NULL:
        summing_close(&t.summing)


cdef int carrier(const Segment* segment, int rank, int host) noexcept nogil:
    """The rank of `host` that receives what `rank`, of another host, offers: the one of the same place, as far as there are as
    many."""
    cdef const Crews* crews = &segment.crews
    return member(crews, host, crews.place_of[rank] % crew_size(crews, host))


cdef void carry(Lanes* t, Lane* lane, int number, uint64_t n, uint64_t begin, uint64_t nbytes) noexcept nogil:
    """Send bytes of the own slot over one connection of a lane."""
    cdef engine_frame frame
    memset(&frame, 0, sizeof(frame))
    frame.type, frame.bytes, frame.offset, frame.position = FRAME_SLOT, <uint32_t>nbytes, <uint32_t>begin, n
    link_queue(&lane.links[number], &frame, segment_slot(t.memory.segment.header, t.memory.segment.rank, n) + begin)
    lane.used |= <uint32_t>1 << number


cdef bint post(Lanes* t, Lane* lane, uint64_t n, uint64_t begin, uint64_t nbytes) noexcept nogil:
    """Give bytes of the own slot to MPI, and announce them. False: it takes no more now."""
    cdef engine_frame frame
    if not courier_send(lane.courier, segment_slot(t.memory.segment.header, t.memory.segment.rank, n) + begin, nbytes):
        return False
    memset(&frame, 0, sizeof(frame))
    frame.type, frame.rank, frame.offset, frame.position = FRAME_MESSAGE, <int32_t>nbytes, <uint32_t>begin, n
    link_queue(&lane.links[0], &frame, NULL)
    t.posted = True
    return True


cdef void offer_to_host(Lanes* t, int host, uint64_t n, uint64_t begin, uint64_t nbytes) noexcept nogil:
    """Send bytes of the own slot, over as many connections as they are worth."""
    cdef Lane* lane = t.to[host]
    cdef uint64_t parts = min(min(<uint64_t>t.sockets, <uint64_t>lane.count), nbytes // PART_BYTES), part, end = begin + nbytes
    if lane.courier != NULL and nbytes >= MESSAGE_BYTES and post(t, lane, n, begin, nbytes):
        return
    if nbytes < PART_BYTES or lane.courier != NULL:
        carry(t, lane, 0, n, begin, nbytes)
        return
    part = (nbytes + parts - 1) // parts
    part += -part % LINE
    while begin < end:
        carry(t, lane, lane.next, n, begin, min(part, end - begin))
        begin += part
        lane.next = (lane.next + 1) % <int>min(t.sockets, <uint32_t>lane.count)


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


cdef void tell_lane(Lane* lane, const Progress* mine) noexcept nogil:
    """Say how far this rank is, on each connection behind what it has carried. The first says which others there are."""
    cdef uint32_t others = lane.used & ~<uint32_t>1
    cdef engine_frame frame
    cdef int k
    memset(&frame, 0, sizeof(frame))
    frame.type, frame.bytes = FRAME_PROGRESS, sizeof(Progress)
    for k in range(1, lane.count):
        if others >> k & 1:
            link_queue(&lane.links[k], &frame, <const char*>mine)
            link_flush(&lane.links[k])
    frame.position = others
    link_queue(&lane.links[0], &frame, <const char*>mine)
    link_flush(&lane.links[0])
    lane.used = 0


cdef void publish(Transport* transport, const Progress* mine) noexcept nogil:
    """On this host first; on others behind what was offered."""
    cdef Lanes* t = <Lanes*>transport
    cdef Segment* segment = t.memory.segment
    cdef int host
    shared_memory_tell(segment, segment.rank, mine)
    for host in range(segment.hosts):
        if t.to[host] != NULL:
            tell_lane(t.to[host], mine)
    if t.posted:
        t.posted = False
        rouse(t)


cdef void rouse(Lanes* t) noexcept nogil:
    """MPI has been given something: have the network thread ask it."""
    if load32_relaxed(&t.dozing):       # MPI's lock, taken since, orders this: see lanes_doze
        write(t.bell, &ONE, 8)


cdef char* sum_room(Transport* transport, uint64_t nbytes) noexcept nogil:
    return summing_room(&(<Lanes*>transport).summing, nbytes)


cdef void sum_all(Transport* transport, uint64_t count, int item_bytes) noexcept nogil:
    cdef Lanes* t = <Lanes*>transport
    summing_begin(&t.summing, count, item_bytes)
    rouse(t)


cdef bint summed(Transport* transport) noexcept nogil:
    return load32_acquire(&(<Lanes*>transport).summing.state) == SUMMING_NOTHING    # pairs with summing_look: the sums are there


# ---- beside the data ---------------------------------------------------------------------------------------------------------

cdef void lanes_tell_end(Lanes* t, const engine_verdict* verdict) noexcept nogil:
    """Tell every rank that has a lane with this one why the world has ended, before it sees the connection end."""
    cdef engine_frame frame
    cdef char* copied
    cdef int r
    memset(&frame, 0, sizeof(frame))
    frame.type, frame.bytes = FRAME_VERDICT, sizeof(engine_verdict)
    for r in range(t.memory.segment.size):
        copied = <char*>malloc(sizeof(engine_verdict)) if t.of[r] != NULL else NULL
        if copied != NULL:
            memcpy(copied, verdict, sizeof(engine_verdict))
            link_give(t.of[r].links, &frame, copied)
            link_flush(t.of[r].links)


cdef const engine_verdict* lanes_end(const Lanes* t) noexcept nogil:
    """Why the world has ended, as some rank of another host was told; NULL: none has said."""
    cdef int r
    for r in range(t.memory.segment.size):
        if t.of[r] != NULL and load32_acquire(&t.of[r].judged):         # pairs with hear_verdict: it is there
            return &t.of[r].verdict
    return NULL


cdef bint lanes_ping(Lanes* t, int rank, uint32_t number) noexcept nogil:
    """Ask `rank` whether its process runs; False if there is no lane with it that is open."""
    cdef engine_frame frame
    if t.of[rank] == NULL or link_state(t.of[rank].links) != OPEN:
        return False
    memset(&frame, 0, sizeof(frame))
    frame.type, frame.position = FRAME_PING, number
    link_queue(t.of[rank].links, &frame, NULL)
    link_flush(t.of[rank].links)
    return True


cdef bint lanes_answered(const Lanes* t, int rank, uint32_t number) noexcept nogil:
    """Whether `rank` has answered that call; or its connection has ended, which is told otherwise."""
    return load32_acquire(&t.of[rank].answered) == number or link_state(t.of[rank].links) != OPEN


# ---- what comes: the network thread alone ------------------------------------------------------------------------------------

cdef char* into(void* owner, Link* link, const engine_frame* frame) noexcept nogil:
    cdef Lanes* t = <Lanes*>owner
    cdef Segment* segment = t.memory.segment
    cdef Lane* lane = t.of[link.peer]
    cdef uint64_t others = ((<uint64_t>1 << lane.count) - 2) if link == lane.links else 0   # that this connection may speak of
    if frame.type == FRAME_LEFT and frame.bytes == 0:
        return <char*>link.small
    if (frame.type == FRAME_PING or frame.type == FRAME_PONG) and frame.bytes == 0 and link == lane.links:
        return <char*>link.small
    if (frame.type == FRAME_VERDICT and frame.bytes == sizeof(engine_verdict) and link == lane.links
            and not load32_relaxed(&lane.judged)):
        return <char*>&lane.verdict
    if not lane.carries:
        return NULL                     # other lanes of that rank tell nothing of how far it is
    if frame.type == FRAME_PROGRESS and frame.bytes == sizeof(Progress) and frame.position & ~others == 0:
        return <char*>link.small
    if frame.position < load_relaxed(&segment.pages[link.peer].copied):
        return NULL
    if frame.type == FRAME_SLOT and <uint64_t>frame.offset + frame.bytes <= SLOT_BYTES:
        return segment_slot(segment.header, link.peer, frame.position) + frame.offset
    if (frame.type == FRAME_MESSAGE and frame.bytes == 0 and lane.courier != NULL and link == lane.links
            and 0 < frame.rank <= SLOT_BYTES and <uint64_t>frame.offset + <uint64_t>frame.rank <= SLOT_BYTES):
        return <char*>link.small
    return NULL


cdef inline bint behind(const Progress* one, const Progress* other) noexcept nogil:
    """Whether `one` is less than `other` at some stage."""
    return one.packed < other.packed or one.reduced < other.reduced or one.copied < other.copied


cdef inline void lower(Progress* passed, const Progress* limit) noexcept nogil:
    passed.packed, passed.reduced = min(passed.packed, limit.packed), min(passed.reduced, limit.reduced)
    passed.copied = min(passed.copied, limit.copied)


cdef bint hear_progress(Lanes* t, Lane* lane, int number, uint64_t others) noexcept nogil:
    """A connection has told how far the peer is, whose bytes up to there have come on it. False: it has told more before."""
    cdef const Progress* heard = <const Progress*>lane.links[number].small
    cdef Progress passed
    cdef int k
    if behind(heard, &lane.told[number]):
        return False
    lane.told[number] = heard[0]
    if lane.courier != NULL and courier_tell(lane.courier, heard):
        return True
    passed = lane.told[0]
    for k in range(1, lane.count):
        if others >> k & 1:
            lane.due[k] = heard[0]
        if behind(&lane.told[k], &lane.due[k]):
            lower(&passed, &lane.told[k])
    reach(t, lane, passed)
    return True


cdef void reach(Lanes* t, Lane* lane, Progress passed) noexcept nogil:
    """The peer is as far as that, at least."""
    cdef Segment* segment = t.memory.segment
    cdef const rank_page* page = segment.pages[lane.links.peer]
    cdef Progress known
    known.packed, known.reduced = load_relaxed(&page.packed), load_relaxed(&page.reduced)
    known.copied = load_relaxed(&page.copied)
    # A connection on which bytes have become due tells of the time before them, of which more may be known.
    passed.packed, passed.reduced = max(passed.packed, known.packed), max(passed.reduced, known.reduced)
    passed.copied = max(passed.copied, known.copied)
    if behind(&known, &passed):
        shared_memory_tell(segment, lane.links.peer, &passed)


cdef void hear_end(Lanes* t, Lane* lane) noexcept nogil:
    """The peer has said on a connection that it is done. When it has said so on all, it has passed its last chunk."""
    cdef Segment* segment = t.memory.segment
    cdef int k
    for k in range(lane.count):
        if not lane.links[k].farewell:
            return
    if lane.ended or (lane.courier != NULL and lane.courier.coming.head != lane.courier.coming.tail):
        return
    lane.ended = True
    if lane.carries:
        store32_release(&segment.pages[lane.links.peer].left, 1)
        add32(&segment.header.departures, 1)
        wake_others(segment, 0)
        wake(segment, segment.rank, 0)


cdef bint hear_verdict(const Segment* segment, Lane* lane) noexcept nogil:
    """The peer has told why the world has ended. False if that cannot be."""
    cdef uint64_t culprit = (lane.verdict.abort & 0xFFFF) - 1
    if culprit >= <uint64_t>segment.size or not CAUSE_NONE < lane.verdict.abort >> 16 & 0xFFFF < CAUSES:
        return False
    lane.verdict.reason[REASON_BYTES - 1] = 0
    store32_release(&lane.judged, 1)            # pairs with lanes_end
    return True


cdef void answer(Link* link, uint64_t number) noexcept nogil:
    cdef engine_frame frame
    memset(&frame, 0, sizeof(frame))
    frame.type, frame.position = FRAME_PONG, number
    link_queue(link, &frame, NULL)
    link_flush(link)


cdef bint done(void* owner, Link* link, const engine_frame* frame) noexcept nogil:
    cdef Lanes* t = <Lanes*>owner
    cdef Lane* lane = t.of[link.peer]
    if frame.type == FRAME_PROGRESS:
        return hear_progress(t, lane, <int>(link - lane.links), frame.position)
    if frame.type == FRAME_MESSAGE:
        return courier_receive(lane.courier, segment_slot(t.memory.segment.header, link.peer, frame.position) + frame.offset,
                               <uint64_t>frame.rank)
    if frame.type == FRAME_PING:
        answer(link, frame.position)
    elif frame.type == FRAME_PONG:
        store32_release(&lane.answered, <uint32_t>frame.position)
    elif frame.type == FRAME_VERDICT:
        return hear_verdict(t.memory.segment, lane)
    elif frame.type == FRAME_LEFT:
        if link.farewell:
            return False
        link_bid_farewell(link)
        hear_end(t, lane)
    return True


# ---- MPI: the network thread alone -------------------------------------------------------------------------------------------

cdef bint busy(Lanes* t) noexcept nogil:
    """Whether messages are under way."""
    cdef const Segment* segment = t.memory.segment
    cdef int r
    for r in range(segment.size):
        if t.of[r] != NULL and t.of[r].courier != NULL and courier_busy(t.of[r].courier):
            return True
    return t.summing.library != NULL and summing_busy(&t.summing)


cdef bint lanes_doze(Lanes* t) noexcept nogil:
    """Whether this thread may sleep without asking MPI, until `lanes_wake`: whoever gives MPI a message meanwhile rings the bell.

    Both take MPI's lock, the giver before its look at `dozing`. So either this look comes later, and sees the message, or the
    giver's does, and sees that nobody asks MPI.
    """
    store32_relaxed(&t.dozing, 1)
    return not busy(t)


cdef void lanes_wake(Lanes* t) noexcept nogil:
    store32_relaxed(&t.dozing, 0)


cdef int lanes_poll(Lanes* t) noexcept nogil:
    """Let MPI go on with what is under way: how many messages have arrived or are sent."""
    cdef const Segment* segment = t.memory.segment
    cdef Progress passed
    cdef Lane* lane
    cdef uint64_t sent
    cdef int r, count, total = 0
    for r in range(segment.size):
        lane = t.of[r]
        if lane == NULL or lane.courier == NULL:
            continue
        sent = load_relaxed(&lane.courier.going.head)
        courier_sent(lane.courier)
        total += <int>(load_relaxed(&lane.courier.going.head) - sent)
        memset(&passed, 0, sizeof(passed))
        count = courier_arrived(lane.courier, &passed)
        if count < 0:
            cas32(<uint32_t*>&lane.links.state, <uint32_t>OPEN, <uint32_t>-EIO)
        elif count > 0:
            total += count
            reach(t, lane, passed)
            hear_end(t, lane)
    if t.summing.library != NULL and summing_look(&t.summing):
        wake(t.memory.segment, t.memory.segment.rank, 0)
        total += 1
    elif load32_relaxed(&t.summing.state) == SUMMING_FAILED:
        fail_some_lane(t)
    return total


cdef void fail_some_lane(Lanes* t) noexcept nogil:
    """MPI cannot sum, and does not say for whose sake: as if it had failed on a lane."""
    cdef int r
    for r in range(t.memory.segment.size):
        if t.of[r] != NULL:
            cas32(<uint32_t*>&t.of[r].links.state, <uint32_t>OPEN, <uint32_t>-EIO)
            return
