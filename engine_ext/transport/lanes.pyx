"""The transport of ranks on several hosts (transport.pxd says what it promises).

Every host has a slot and a page for each rank of the world. Those of ranks on other hosts are *shadows*. What such a rank offers
comes over a lane. The reader (connections.pxd) of the rank that *carries* it writes it to the same place of the shadow slot, and
then that rank's progress to the shadow page. So ranks wait and read as on one host. Every promise follows from the order of bytes
on one connection: what a rank wrote to its slot comes before the progress that includes it.

A lane may have several connections, since one does not fill a fast network. A large offer is cut, and each connection carries a
part. The sender's progress goes over every connection that has carried bytes since it last sent it. It always goes over the
first connection, whose frame lists the others. So the sender may change the number of connections at any time, and a small offer
costs one frame whatever their number. A rank's progress is the least that is reported by the connections on which bytes are due.

Lanes may also have a carrier beside their connections (carrier.h), such as MPI, which takes large offers. The connection
announces each message, and the peer's progress behind it. Nobody can sleep on a carrier, so it is polled only while messages are
in flight. A peer that is gone shows, as without a carrier, by the end of its connection.

There is no flow control. A rank writes chunk n + SLOTS over chunk n only when every rank has copied chunk n. By then every host
has received it, so it has been sent.
"""
from libc.errno cimport EREMOTEIO
from libc.stdint cimport int32_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset

from engine_ext.platform.atomics cimport (
    add32, cas32, load32_acquire, load32_relaxed, load_acquire, load_relaxed, store32_release, store_release,
)
from engine_ext.platform.posix cimport write
from engine_ext.shared.crews cimport Crews, crew_size, member
from engine_ext.shared.layout cimport CAUSE_NONE, CAUSES, REASON_BYTES, SLOT_BYTES, rank_page, segment_slot
from engine_ext.shared.segment cimport nearby, wake, wake_others
from engine_ext.transport.carrier cimport (
    ENGINE_CARRIER_BUSY, ENGINE_CARRIER_DONE, ENGINE_CARRIER_FAILED, ENGINE_CARRIER_MESSAGES, engine_carrier,
)
from engine_ext.transport.link cimport (
    FRAME_CAUSE, FRAME_LEFT, FRAME_MESSAGE, FRAME_PING, FRAME_PONG, FRAME_PROGRESS, FRAME_SLOT, OPEN, engine_failure_cause,
    engine_frame, link_acknowledge_end, link_flush, link_give, link_queue, link_state,
)
from engine_ext.transport.shm cimport shared_memory_open, shared_memory_publish
from engine_ext.transport.transport cimport Progress

cdef uint64_t ONE = 1

cdef enum:
    PART_BYTES = 64 << 10       # least part of a slot for which another connection is used
    LINE = 64                   # bytes of a cache line; parts are multiples of it
    MESSAGE_BYTES = 16 << 10    # least message for any carrier, so that a rank's slots hold fewer than ENGINE_CARRIER_MESSAGES
    SUMMING_NOTHING = 0         # no sum was begun, or the last is done
    SUMMING_GOES_ON = 1
    SUMMING_FAILED = 2


cdef Transport* lanes_open(Lanes* t, Segment* segment, Lane** to, Lane** of, int bell) noexcept nogil:
    """Fill in a transport over a mapped segment and open lanes, which the caller owns."""
    cdef Transport* functions = shared_memory_open(&t.memory, segment)
    t.to, t.of, t.sockets, t.bell = to, of, MAX_SOCKETS, bell
    t.carrier, t.announced, t.summing, t.posted, t.dozing = NULL, NULL, SUMMING_NOTHING, False, 0
    t.room, t.room_bytes = NULL, 0
    functions.publish, functions.offer = publish, offer
    t.receiver.find_target, t.receiver.handle_frame, t.receiver.owner = find_target, handle_frame, t
    return functions


cdef bint lanes_use(Lanes* t, engine_carrier* carrier) noexcept nogil:
    """Send large offers over a carrier, which `lanes_close` closes; False without memory. All ranks call this before anything is
    submitted. A carrier that can sum does so for the world, not for process sets."""
    cdef const Segment* segment = t.memory.segment
    cdef Transport* functions = &t.memory.functions
    cdef int r, count = 0
    t.carrier = carrier
    for r in range(segment.size):
        count += t.of[r] != NULL
    t.announced = <Announced*>calloc(count * ENGINE_CARRIER_MESSAGES, sizeof(Announced))
    if t.announced == NULL:
        return False
    count = 0
    for r in range(segment.size):
        if t.of[r] != NULL:
            t.of[r].coming = t.announced + count * ENGINE_CARRIER_MESSAGES
            count += 1
    if carrier.sum != NULL and segment.world == segment:
        t.memory.segment.crews.summing = True
        functions.sum_room, functions.sum, functions.summed = sum_room, sum_all, summed
    return True


cdef bint lanes_close(Lanes* t) noexcept nogil:
    """Close the carrier, after the network thread has ended. False: it may still write to the slots of ranks on other hosts."""
    cdef bint over = t.carrier == NULL or t.carrier.close(t.carrier) == ENGINE_CARRIER_DONE
    free(t.announced)
    t.carrier, t.announced = NULL, NULL
    return over


cdef int carrying_rank(const Segment* segment, int rank, int host) noexcept nogil:
    """Return the rank of `host` that receives what `rank`, of another host, offers: the one with the same place, modulo the
    number of ranks of `host`."""
    cdef const Crews* crews = &segment.crews
    return member(crews, host, crews.place_of[rank] % crew_size(crews, host))


cdef void send_slot_part(Lanes* t, Lane* lane, int number, uint64_t n, uint64_t begin, uint64_t nbytes) noexcept nogil:
    """Send bytes of this rank's slot over one connection of a lane."""
    cdef engine_frame frame
    memset(&frame, 0, sizeof(frame))
    frame.type, frame.bytes, frame.offset, frame.position = FRAME_SLOT, <uint32_t>nbytes, <uint32_t>begin, n
    link_queue(&lane.links[number], &frame, segment_slot(t.memory.segment.header, t.memory.segment.rank, n) + begin)
    lane.used |= <uint32_t>1 << number


cdef bint send_message(Lanes* t, Lane* lane, uint64_t n, uint64_t begin, uint64_t nbytes) noexcept nogil:
    """Give bytes of this rank's slot to the carrier, and announce them. False: it takes no more now."""
    cdef const Segment* segment = t.memory.segment
    cdef const char* source = segment_slot(segment.header, segment.rank, n) + begin
    cdef engine_frame frame
    if load32_relaxed(&lane.failed) or lane.given - load_acquire(&lane.sent) >= ENGINE_CARRIER_MESSAGES:
        return False
    store_release(&lane.given, lane.given + 1)      # before `send`: the network thread may count the message as sent at once
    if t.carrier.send(t.carrier, segment.numbers[lane.links.peer], source, <uint32_t>nbytes) != ENGINE_CARRIER_DONE:
        store_release(&lane.given, lane.given - 1)
        return False
    memset(&frame, 0, sizeof(frame))
    frame.type, frame.rank, frame.offset, frame.position = FRAME_MESSAGE, <int32_t>nbytes, <uint32_t>begin, n
    link_queue(&lane.links[0], &frame, NULL)
    t.posted = True
    return True


cdef void offer_to_host(Lanes* t, int host, uint64_t n, uint64_t begin, uint64_t nbytes) noexcept nogil:
    """Send bytes of this rank's slot to a host, by the carrier or by as many connections as their number justifies."""
    cdef Lane* lane = t.to[host]
    cdef uint64_t parts = min(min(<uint64_t>t.sockets, <uint64_t>lane.count), nbytes // PART_BYTES), part, end = begin + nbytes
    if (t.carrier != NULL and nbytes >= max(<uint64_t>t.carrier.least_bytes, <uint64_t>MESSAGE_BYTES)
            and send_message(t, lane, n, begin, nbytes)):
        return
    if nbytes < PART_BYTES or t.carrier != NULL:
        send_slot_part(t, lane, 0, n, begin, nbytes)
        return
    part = (nbytes + parts - 1) // parts
    part += -part % LINE
    while begin < end:
        send_slot_part(t, lane, lane.next, n, begin, min(part, end - begin))
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


cdef void send_progress(Lane* lane, const Progress* mine) noexcept nogil:
    """Send this rank's progress on each used connection, behind its bytes. The first connection's frame lists the others."""
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
    """Publish progress on this host first, then to other hosts behind what was offered."""
    cdef Lanes* t = <Lanes*>transport
    cdef Segment* segment = t.memory.segment
    cdef int host
    shared_memory_publish(segment, segment.rank, mine)
    for host in range(segment.hosts):
        if t.to[host] != NULL:
            send_progress(t.to[host], mine)
    if t.posted:
        t.posted = False
        wake_poller(t)


cdef void wake_poller(Lanes* t) noexcept nogil:
    """Have the network thread poll the carrier, which was given something."""
    if add32(&t.dozing, 0):             # read-modify-write, as in lanes_doze: the caller's stores come before it
        write(t.bell, &ONE, 8)


cdef char* sum_room(Transport* transport, uint64_t nbytes) noexcept nogil:
    """Return the carrier's memory for a sum. It is asked for anew only when the size changes, so pack and finish get the same."""
    cdef Lanes* t = <Lanes*>transport
    if t.room == NULL or t.room_bytes != nbytes:
        t.room, t.room_bytes = <char*>t.carrier.sum_memory(t.carrier, nbytes), nbytes
    return t.room


cdef void sum_all(Transport* transport, uint64_t count, int item_bytes) noexcept nogil:
    cdef Lanes* t = <Lanes*>transport
    cdef bint begun = t.carrier.sum(t.carrier, t.room, count, item_bytes) == ENGINE_CARRIER_DONE
    store32_release(&t.summing, SUMMING_GOES_ON if begun else SUMMING_FAILED)       # pairs with lanes_poll: the sum has begun
    wake_poller(t)


cdef bint summed(Transport* transport) noexcept nogil:
    return load32_acquire(&(<Lanes*>transport).summing) == SUMMING_NOTHING      # pairs with lanes_poll: the sums are complete


# ---- failure causes and pings ------------------------------------------------------------------------------------------------

cdef void lanes_send_failure_cause(Lanes* t, const engine_failure_cause* cause) noexcept nogil:
    """Send the failure cause to every rank that has a lane with this one, before it sees the connection end."""
    cdef engine_frame frame
    cdef char* copied
    cdef int r
    memset(&frame, 0, sizeof(frame))
    frame.type, frame.bytes = FRAME_CAUSE, sizeof(engine_failure_cause)
    for r in range(t.memory.segment.size):
        copied = <char*>malloc(sizeof(engine_failure_cause)) if t.of[r] != NULL else NULL
        if copied != NULL:
            memcpy(copied, cause, sizeof(engine_failure_cause))
            link_give(t.of[r].links, &frame, copied)
            link_flush(t.of[r].links)


cdef const engine_failure_cause* lanes_failure_cause(const Lanes* t) noexcept nogil:
    """Return the failure cause that a rank of another host has sent; NULL: none has."""
    cdef int r
    for r in range(t.memory.segment.size):
        if t.of[r] != NULL and load32_acquire(&t.of[r].cause_known):         # pairs with handle_failure_cause
            return &t.of[r].failure_cause
    return NULL


cdef bint lanes_ping(Lanes* t, int rank, uint32_t number) noexcept nogil:
    """Ask `rank` whether its process runs, by a ping with this number; False: there is no open lane to it."""
    cdef engine_frame frame
    if t.of[rank] == NULL or link_state(t.of[rank].links) != OPEN:
        return False
    memset(&frame, 0, sizeof(frame))
    frame.type, frame.position = FRAME_PING, number
    link_queue(t.of[rank].links, &frame, NULL)
    link_flush(t.of[rank].links)
    return True


cdef bint lanes_answered(const Lanes* t, int rank, uint32_t number) noexcept nogil:
    """Return whether `rank` has answered that ping, or its connection has ended, which is handled elsewhere."""
    return load32_acquire(&t.of[rank].answered) == number or link_state(t.of[rank].links) != OPEN


# ---- incoming frames: the reader alone --------------------------------------------------------------------------------------

cdef char* find_target(void* owner, Link* link, const engine_frame* frame) noexcept nogil:
    """Return the address for a frame's payload, `link.small` for one without; NULL: the frame is not allowed here."""
    cdef Lanes* t = <Lanes*>owner
    cdef Segment* segment = t.memory.segment
    cdef Lane* lane = t.of[link.peer]
    cdef uint64_t others = ((<uint64_t>1 << lane.count) - 2) if link == lane.links else 0   # connections that it may list
    if frame.type == FRAME_LEFT and frame.bytes == 0:
        return <char*>link.small
    if (frame.type == FRAME_PING or frame.type == FRAME_PONG) and frame.bytes == 0 and link == lane.links:
        return <char*>link.small
    if (frame.type == FRAME_CAUSE and frame.bytes == sizeof(engine_failure_cause) and link == lane.links
            and not load32_relaxed(&lane.cause_known)):
        return <char*>&lane.failure_cause
    if not lane.carries:
        return NULL                     # another rank of this host carries the peer: this lane brings no slots and no progress
    if frame.type == FRAME_PROGRESS and frame.bytes == sizeof(Progress) and frame.position & ~others == 0:
        return <char*>link.small
    if frame.position < load_relaxed(&segment.pages[link.peer].copied):
        return NULL
    if frame.type == FRAME_SLOT and <uint64_t>frame.offset + frame.bytes <= SLOT_BYTES:
        return segment_slot(segment.header, link.peer, frame.position) + frame.offset
    if (frame.type == FRAME_MESSAGE and frame.bytes == 0 and t.carrier != NULL and link == lane.links
            and 0 < frame.rank <= SLOT_BYTES and <uint64_t>frame.offset + <uint64_t>frame.rank <= SLOT_BYTES):
        return <char*>link.small
    return NULL


cdef inline bint is_behind(const Progress* one, const Progress* other) noexcept nogil:
    """Return whether `one` is less than `other` at some stage."""
    return one.packed < other.packed or one.reduced < other.reduced or one.copied < other.copied


cdef inline void limit_progress(Progress* passed, const Progress* limit) noexcept nogil:
    passed.packed, passed.reduced = min(passed.packed, limit.packed), min(passed.reduced, limit.reduced)
    passed.copied = min(passed.copied, limit.copied)


cdef bint handle_progress(Lanes* t, Lane* lane, int number, uint64_t others) noexcept nogil:
    """Process the progress that the peer reports on a connection, whose bytes up to there have come. False: progress went back.
    `others` has bit k for each other connection on which bytes are due."""
    cdef const Progress* received = <const Progress*>lane.links[number].small
    cdef Announced* last
    cdef Progress passed
    cdef int k
    if is_behind(received, &lane.reported[number]):
        return False
    lane.reported[number] = received[0]
    if lane.announced != lane.arrived:
        last = &lane.coming[(lane.announced - 1) % ENGINE_CARRIER_MESSAGES]
        last.tells, last.passed = True, received[0]
        return True
    passed = lane.reported[0]
    for k in range(1, lane.count):
        if others >> k & 1:
            lane.due[k] = received[0]
        if is_behind(&lane.reported[k], &lane.due[k]):
            limit_progress(&passed, &lane.reported[k])
    advance_peer(t, lane, passed)
    return True


cdef void advance_peer(Lanes* t, Lane* lane, Progress passed) noexcept nogil:
    """Advance the peer's page to `passed`, unless it is further."""
    cdef Segment* segment = t.memory.segment
    cdef const rank_page* page = segment.pages[lane.links.peer]
    cdef Progress known
    known.packed, known.reduced = load_relaxed(&page.packed), load_relaxed(&page.reduced)
    known.copied = load_relaxed(&page.copied)
    # A connection on which bytes are now due still reports earlier progress, which may be less than the known one.
    passed.packed, passed.reduced = max(passed.packed, known.packed), max(passed.reduced, known.reduced)
    passed.copied = max(passed.copied, known.copied)
    if is_behind(&known, &passed):
        shared_memory_publish(segment, lane.links.peer, &passed)


cdef void handle_peer_end(Lanes* t, Lane* lane) noexcept nogil:
    """Note that the peer has left, once it has said so on all connections: it has passed its last chunk."""
    cdef Segment* segment = t.memory.segment
    cdef int k
    for k in range(lane.count):
        if not lane.links[k].peer_ended:
            return
    if lane.ended or lane.announced != lane.arrived:
        return
    lane.ended = True
    if lane.carries:
        store32_release(&segment.pages[lane.links.peer].left, 1)
        add32(&segment.header.departures, 1)
        wake_others(segment, 0)
        wake(segment, segment.rank, 0)


cdef bint receive_message(Lanes* t, Lane* lane, const engine_frame* frame) noexcept nogil:
    """Receive a message that the peer has announced. False: the carrier cannot receive it, or there are more than the contract
    allows. Then later messages are ignored, since the carrier would take them for this one."""
    cdef const Segment* segment = t.memory.segment
    cdef int peer = lane.links.peer
    cdef void* target = segment_slot(segment.header, peer, frame.position) + frame.offset
    if load32_relaxed(&lane.failed) or lane.announced - lane.arrived == ENGINE_CARRIER_MESSAGES:
        return False
    lane.coming[lane.announced % ENGINE_CARRIER_MESSAGES].tells = False
    lane.announced += 1
    if t.carrier.receive(t.carrier, segment.numbers[peer], target, <uint32_t>frame.rank) != ENGINE_CARRIER_DONE:
        fail_lane(lane)
        return False
    return True


cdef bint handle_failure_cause(const Segment* segment, Lane* lane) noexcept nogil:
    """Check and publish the failure cause that the peer has sent. False: it is invalid."""
    cdef uint64_t culprit = (lane.failure_cause.abort & 0xFFFF) - 1
    if culprit >= <uint64_t>segment.size or not CAUSE_NONE < lane.failure_cause.abort >> 16 & 0xFFFF < CAUSES:
        return False
    lane.failure_cause.reason[REASON_BYTES - 1] = 0
    store32_release(&lane.cause_known, 1)            # pairs with lanes_failure_cause
    return True


cdef void send_pong(Link* link, uint64_t number) noexcept nogil:
    cdef engine_frame frame
    memset(&frame, 0, sizeof(frame))
    frame.type, frame.position = FRAME_PONG, number
    link_queue(link, &frame, NULL)
    link_flush(link)


cdef bint handle_frame(void* owner, Link* link, const engine_frame* frame) noexcept nogil:
    cdef Lanes* t = <Lanes*>owner
    cdef Lane* lane = t.of[link.peer]
    if frame.type == FRAME_PROGRESS:
        return handle_progress(t, lane, <int>(link - lane.links), frame.position)
    if frame.type == FRAME_MESSAGE:
        return receive_message(t, lane, frame)
    if frame.type == FRAME_PING:
        send_pong(link, frame.position)
    elif frame.type == FRAME_PONG:
        store32_release(&lane.answered, <uint32_t>frame.position)
    elif frame.type == FRAME_CAUSE:
        return handle_failure_cause(t.memory.segment, lane)
    elif frame.type == FRAME_LEFT:
        if link.peer_ended:
            return False
        link_acknowledge_end(link)
        handle_peer_end(t, lane)
    return True


# ---- the carrier: the network thread; read-only functions may be called by others --------------------------------------------

cdef inline bint lane_is_busy(const Lane* lane) noexcept nogil:
    """Return whether messages are in flight, and the carrier can go on with them."""
    return (lane.announced != lane.arrived or load_acquire(&lane.given) != load_relaxed(&lane.sent)) and not lane.failed


cdef bint lane_is_cut(const Lane* lane) noexcept nogil:
    """Return whether a message that the peer has announced will never arrive."""
    return load32_relaxed(&lane.failed) and lane.announced != lane.arrived


cdef uint64_t lanes_messages(const Lanes* t) noexcept nogil:
    """Return the number of messages that the carrier was given."""
    cdef uint64_t total = 0
    cdef int r
    for r in range(t.memory.segment.size if t.carrier != NULL else 0):
        total += load_relaxed(&t.of[r].given) if t.of[r] != NULL else 0
    return total


cdef bint lane_is_delivered(const Lane* lane) noexcept nogil:
    """Return whether the carrier has sent all that it was given, so that it arrives without this rank."""
    return load_relaxed(&lane.given) == load_acquire(&lane.sent)


cdef bint lanes_delivered(const Lanes* t) noexcept nogil:
    """Return whether the carrier has sent all messages, except on lanes with which it cannot go on."""
    cdef int r
    for r in range(t.memory.segment.size if t.carrier != NULL else 0):
        if t.of[r] != NULL and not lane_is_delivered(t.of[r]) and not load32_acquire(&t.of[r].failed):
            return False
    return True


cdef bint lanes_doze(Lanes* t) noexcept nogil:
    """Set `dozing`, and return whether this thread may sleep without polling the carrier. Until `lanes_wake`, a thread that gives
    the carrier something rings the bell.

    All accesses to `dozing` are read-modify-write, so they have one order. If this one comes later, the checks below see what was
    given. If the giver's comes later, it sees that nobody polls.
    """
    cdef int r
    add32(&t.dozing, 1)
    for r in range(t.memory.segment.size):
        if t.of[r] != NULL and lane_is_busy(t.of[r]):
            return False
    return load32_relaxed(&t.summing) == SUMMING_NOTHING        # a failed sum has to be handled as well


cdef void lanes_wake(Lanes* t) noexcept nogil:
    """Clear `dozing`: this thread polls the carrier again."""
    cas32(&t.dozing, 1, 0)


cdef int lanes_poll(Lanes* t) noexcept nogil:
    """Poll the carrier for messages and sums in flight; return the number of messages sent or arrived, plus sums that ended."""
    cdef int r, done, total = 0
    for r in range(t.memory.segment.size):
        if t.of[r] != NULL and lane_is_busy(t.of[r]):
            total += poll_lane(t, t.of[r])
    if load32_acquire(&t.summing) == SUMMING_GOES_ON:           # pairs with sum_all
        done = t.carrier.summed(t.carrier)
        if done != ENGINE_CARRIER_BUSY:
            store32_release(&t.summing, SUMMING_NOTHING if done == ENGINE_CARRIER_DONE else SUMMING_FAILED)
            wake(t.memory.segment, t.memory.segment.rank, 0)
            total += 1
    if load32_relaxed(&t.summing) == SUMMING_FAILED:
        fail_some_lane(t)
    return total


cdef int poll_lane(Lanes* t, Lane* lane) noexcept nogil:
    """Poll the carrier for one lane; return the number of messages sent or arrived. A carrier that counts more than there are has
    failed."""
    cdef uint64_t sent = 0, arrived = 0
    cdef int state = t.carrier.progress(t.carrier, t.memory.segment.numbers[lane.links.peer], &sent, &arrived)
    if (state == ENGINE_CARRIER_FAILED or sent > load_acquire(&lane.given) - load_relaxed(&lane.sent)
            or arrived > lane.announced - lane.arrived):
        fail_lane(lane)
        return 0
    store_release(&lane.sent, load_relaxed(&lane.sent) + sent)
    if arrived:
        pass_arrived(t, lane, arrived)
    return <int>(sent + arrived)


cdef void pass_arrived(Lanes* t, Lane* lane, uint64_t count) noexcept nogil:
    """Count messages that have arrived, and advance the peer to what it reported behind the last of them."""
    cdef const Announced* message
    cdef Progress passed
    cdef uint64_t k
    memset(&passed, 0, sizeof(passed))
    for k in range(lane.arrived, lane.arrived + count):
        message = &lane.coming[k % ENGINE_CARRIER_MESSAGES]
        if message.tells:
            passed = message.passed
    lane.arrived += count
    advance_peer(t, lane, passed)
    handle_peer_end(t, lane)


cdef void fail_lane(Lane* lane) noexcept nogil:
    """Handle that the carrier cannot go on with a lane, as if its connection had failed. The carrier is no longer polled for this
    lane, since its count of later messages could be taken for this one's."""
    store32_release(&lane.failed, 1)
    cas32(<uint32_t*>&lane.links.state, <uint32_t>OPEN, <uint32_t>-EREMOTEIO)


cdef void fail_some_lane(Lanes* t) noexcept nogil:
    """Fail the first lane, since the carrier cannot sum and does not say which rank is at fault."""
    cdef int r
    for r in range(t.memory.segment.size):
        if t.of[r] != NULL:
            fail_lane(t.of[r])
            return
