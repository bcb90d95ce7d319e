"""Frames over one connection (frames.h). No function blocks. Only the merging of queued frames depends on their types.

Payloads are sent without a copy. A slot, a request ring and the schedule stay unchanged until their readers have the bytes, by
the same rules as on one host (docs/architecture/protocol-hosts.md).
"""
from libc.errno cimport ENOMEM, EPIPE, EPROTO, ETIMEDOUT
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

from engine_ext.platform.atomics cimport cas32, load32_relaxed, now_ns, store32_release, store_relaxed
from engine_ext.platform.clock cimport overdue_ns
from engine_ext.platform.posix cimport (
    close, pthread_mutex_destroy, pthread_mutex_init, pthread_mutex_lock, pthread_mutex_unlock,
)

cdef extern from "<sys/uio.h>" nogil:
    cdef struct iovec:
        void* iov_base
        size_t iov_len

cdef extern from "<sys/socket.h>" nogil:
    enum: SHUT_RDWR
    int shutdown(int fd, int how)

cdef extern from "platform/sockets.h" nogil:
    enum: ENGINE_SOCKET_SHORT
    int64_t engine_socket_send(int fd, iovec* parts, int count)
    int64_t engine_socket_receive(int fd, iovec* parts, int count)
    bint engine_socket_owed(int fd, uint32_t* silent)
    bint engine_socket_delivered(int fd)
    void engine_socket_acknowledge(int fd)

cdef enum:
    ROOM_AT_FIRST = 64      # first capacity of a queue, in frames
    PARTS = 32              # most buffers of one system call
    TURN = 64               # most reads from one connection before others have their turn
    STARVED_NS = 30000000000    # how long the system may lack memory for a connection before the connection fails


cdef inline bint is_open(const Link* link) noexcept nogil:
    return link_state(link) == OPEN


cdef void link_open(Link* link, int fd, int peer, uint32_t* sent_any, uint32_t* starved) noexcept nogil:
    """Initialize a link over a connected socket, which it owns from now on."""
    memset(link, 0, sizeof(Link))
    link.fd, link.peer, link.state, link.sent_any, link.starved = fd, peer, OPEN, sent_any, starved
    pthread_mutex_init(&link.lock, NULL)


cdef void fall_silent(Link* link) noexcept nogil:
    """Drop the waiting frames, and all later ones. The caller holds the lock, or no other thread uses the link."""
    link.mute = True
    while link.head != link.tail:
        free(link.queue[link.head & (link.room - 1)].owned)
        link.head += 1


cdef void link_end(Link* link, int error) noexcept nogil:
    """End the connection, which both sides see. `error` becomes its state here, unless it has ended before."""
    cas32(<uint32_t*>&link.state, <uint32_t>OPEN, <uint32_t>error)
    shutdown(link.fd, SHUT_RDWR)


cdef void link_break(Link* link) noexcept nogil:
    """End the connection for lack of memory."""
    pthread_mutex_lock(&link.lock)
    fall_silent(link)
    pthread_mutex_unlock(&link.lock)
    link_end(link, -ENOMEM)


cdef bint may_recover(Link* link, uint64_t* since) noexcept nogil:
    """Note that the system had no memory for a call, so that the owner tries again soon. Return whether it may, False once memory
    has been lacking for STARVED_NS. `since` is the link's out_starved or in_starved."""
    cdef uint64_t now = now_ns()
    if since[0] == 0:
        since[0] = now
    store32_release(link.starved, 1)
    store32_release(link.sent_any, 1)         # after `starved`: network_rest reads them in reverse order
    return not overdue_ns(now, since[0], STARVED_NS)


cdef void link_close(Link* link) noexcept nogil:
    """Free the link and close its socket. No other thread uses it any more."""
    fall_silent(link)
    free(link.queue)
    close(link.fd)
    pthread_mutex_destroy(&link.lock)


# ---- outgoing frames ---------------------------------------------------------------------------------------------------------

cdef bint make_room(Link* link) noexcept nogil:
    """Make room for one more frame; False without memory. The caller holds the lock."""
    cdef uint32_t room = 2 * link.room if link.room else ROOM_AT_FIRST, k
    cdef Outgoing* queue
    if link.tail - link.head < link.room:
        return True
    queue = <Outgoing*>malloc(room * sizeof(Outgoing))
    if queue == NULL:
        return False
    k = link.head
    while k != link.tail:
        queue[k & (room - 1)] = link.queue[k & (link.room - 1)]
        k += 1
    free(link.queue)
    link.queue, link.room = queue, room
    return True


cdef bint continues_last(const Outgoing* last, const engine_frame* head, const char* data) noexcept nogil:
    """Return whether the bytes of a slot continue those of the last frame, so that one frame can carry both."""
    return (last.sent == 0 and head.type == FRAME_SLOT and last.head.type == FRAME_SLOT
            and last.head.position == head.position and last.data + last.head.bytes == data
            and last.head.bytes + head.bytes <= FRAME_LONGEST)


cdef bint replaces_last(const Outgoing* last, const engine_frame* head) noexcept nogil:
    """Return whether a frame replaces the last one, of which nothing is sent yet: only the newest pong and the newest clock frame
    count. So a peer that keeps asking and never reads cannot make the queue grow."""
    return (last.sent == 0 and last.head.type == head.type and last.head.bytes == head.bytes
            and (head.type == FRAME_PONG or head.type == FRAME_CLOCK))


cdef void link_queue(Link* link, const engine_frame* head, const char* data) noexcept nogil:
    """Append a frame to the queue. The caller keeps the payload unchanged until it is sent, unless it is small and so copied."""
    add_frame(link, head, data, NULL)


cdef void link_give(Link* link, const engine_frame* head, char* owned) noexcept nogil:
    """Append a frame whose payload is malloc'ed; the link frees it in any case."""
    add_frame(link, head, owned, owned)


cdef void link_leave(Link* link) noexcept nogil:
    """Tell the other side that this one is done."""
    cdef engine_frame frame
    memset(&frame, 0, sizeof(frame))
    frame.type = FRAME_LEFT
    add_frame(link, &frame, NULL, NULL)


cdef void add_frame(Link* link, const engine_frame* head, const char* data, char* owned) noexcept nogil:
    """Append a frame, or merge it with the last one. Without memory the connection ends. A mute link drops the frame; its
    receiving half reports why."""
    cdef Outgoing* out
    pthread_mutex_lock(&link.lock)
    if not link.mute and link.head != link.tail and continues_last(&link.queue[(link.tail - 1) & (link.room - 1)], head, data):
        link.queue[(link.tail - 1) & (link.room - 1)].head.bytes += head.bytes
    elif not link.mute and link.head != link.tail and replaces_last(&link.queue[(link.tail - 1) & (link.room - 1)], head):
        out = &link.queue[(link.tail - 1) & (link.room - 1)]
        out.head = head[0]
        if data != NULL:
            memcpy(out.small, data, head.bytes)
    elif not link.mute and make_room(link):
        out = &link.queue[link.tail & (link.room - 1)]
        out.head, out.data, out.owned, out.sent = head[0], data, owned, 0
        if owned == NULL and head.bytes <= sizeof(out.small) and head.type != FRAME_SLOT:
            out.data = NULL
            if data != NULL:
                memcpy(out.small, data, head.bytes)
        link.tail += 1
        owned = NULL
    elif not link.mute:
        fall_silent(link)
        link_end(link, -ENOMEM)
    pthread_mutex_unlock(&link.lock)
    free(owned)


cdef int gather_parts(Link* link, iovec* parts) noexcept nogil:
    """Fill in the next buffers to send, at most PARTS; return their number. The caller holds the lock."""
    cdef const Outgoing* out
    cdef uint64_t head_bytes = sizeof(engine_frame), begin
    cdef uint32_t k = link.head
    cdef int count = 0
    while k != link.tail and count + 2 <= PARTS:
        out = &link.queue[k & (link.room - 1)]
        if out.sent < head_bytes:
            parts[count].iov_base = <char*>&out.head + out.sent
            parts[count].iov_len = head_bytes - out.sent
            count += 1
        begin = out.sent - head_bytes if out.sent > head_bytes else 0
        if begin < out.head.bytes:
            parts[count].iov_base = (<char*>out.data if out.data != NULL else <char*>out.small) + begin
            parts[count].iov_len = out.head.bytes - begin
            count += 1
        k += 1
    return count


cdef void pass_over(Link* link, uint64_t sent) noexcept nogil:
    """Note that the system has taken `sent` bytes: drop the frames that are complete. The caller holds the lock."""
    cdef Outgoing* out
    cdef uint64_t left
    while sent:
        out = &link.queue[link.head & (link.room - 1)]
        left = sizeof(engine_frame) + out.head.bytes - out.sent
        if sent < left:
            out.sent += sent
            return
        sent -= left
        free(out.owned)
        link.head += 1


cdef bint link_flush(Link* link) noexcept nogil:
    """Send what the connection takes now. Return True if frames were waiting and none is any more."""
    cdef iovec[PARTS] parts
    cdef int64_t sent
    cdef bint waited
    pthread_mutex_lock(&link.lock)
    waited = link.head != link.tail
    while link.head != link.tail:
        sent = engine_socket_send(link.fd, parts, gather_parts(link, parts))
        if sent == ENGINE_SOCKET_SHORT and may_recover(link, &link.out_starved):
            break
        if sent < 0:
            if sent != -EPIPE:              # the system reports the failure's cause to one call only, which was this one
                store32_release(<uint32_t*>&link.unsent, <uint32_t>sent)
            fall_silent(link)
        if sent <= 0:
            break
        link.out_starved = 0
        store32_release(link.sent_any, 1)
        store_relaxed(&link.out_bytes, link.out_bytes + <uint64_t>sent)
        pass_over(link, <uint64_t>sent)
    waited &= link.head == link.tail
    pthread_mutex_unlock(&link.lock)
    return waited


cdef bint link_idle(Link* link) noexcept nogil:
    """Return whether the system has taken everything that was queued."""
    cdef bint idle
    pthread_mutex_lock(&link.lock)
    idle = link.head == link.tail
    pthread_mutex_unlock(&link.lock)
    return idle


cdef bint link_delivered(Link* link) noexcept nogil:
    """Return whether the other side's system has received everything that was queued, or never will."""
    cdef bint delivered
    pthread_mutex_lock(&link.lock)
    delivered = link.head == link.tail and (link.mute or not is_open(link) or engine_socket_delivered(link.fd))
    pthread_mutex_unlock(&link.lock)
    return delivered


# ---- incoming frames ---------------------------------------------------------------------------------------------------------

cdef bint take_in(Link* link, const Receiver* receiver, uint64_t came) noexcept nogil:
    """Note that `came` bytes have come: begin the payload, or finish the frame. False: the frame is not allowed here."""
    cdef uint64_t head_bytes = sizeof(engine_frame), left
    while True:
        left = head_bytes + (link.coming.bytes if link.came >= head_bytes else 0) - link.came
        if came < left:
            link.came += came
            return True
        came -= left
        link.came += left
        if link.came == head_bytes:
            if link.coming.bytes > FRAME_LONGEST:
                return False
            link.target = receiver.find_target(receiver.owner, link, &link.coming)
            if link.target == NULL:
                return False
            if link.coming.bytes:
                continue
        if not receiver.handle_frame(receiver.owner, link, &link.coming):
            return False
        link.came = 0


cdef bint take_over(Link* link, const Receiver* receiver, uint64_t nbytes) noexcept nogil:
    """Move `nbytes` bytes from `ahead` to where they belong, and take them in. False: a frame is not allowed here."""
    cdef const char* data = receiver.ahead
    cdef uint64_t head_bytes = sizeof(engine_frame), part
    while nbytes:
        if link.came < head_bytes:
            part = min(head_bytes - link.came, nbytes)
            memcpy(<char*>&link.coming + link.came, data, part)
        else:
            part = min(head_bytes + link.coming.bytes - link.came, nbytes)
            memcpy(link.target + (link.came - head_bytes), data, part)
        if not take_in(link, receiver, part):
            return False
        data += part
        nbytes -= part
    return True


cdef bint link_check_acks(Link* link, uint32_t patience_ms) noexcept nogil:
    """Return whether the other side owes an acknowledgement. If it has owed one for `patience_ms`, end the connection: the kernel
    alone would try for a quarter of an hour."""
    cdef uint32_t silent = 0
    cdef uint64_t now = now_ns()
    cdef bint owed = is_open(link) and engine_socket_owed(link.fd, &silent)
    if not owed:
        link.owed_since = 0
    elif link.owed_since == 0:
        link.owed_since = now       # not the last answer's time, which is older if nothing was sent meanwhile
    elif silent >= patience_ms and overdue_ns(now, link.owed_since, patience_ms * <uint64_t>1000000):
        link_end(link, -ETIMEDOUT)
    return owed


cdef void link_acknowledge_end(Link* link) noexcept nogil:
    """Note that the other side is done, and acknowledge it at once, since it waits for that."""
    link.peer_ended = True
    engine_socket_acknowledge(link.fd)


cdef bint link_receive(Link* link, const Receiver* receiver, bint ended) noexcept nogil:
    """Take in what has come; return whether there may be more. An error or the end is in `state`. A short read ends the turn,
    since the poller announces later bytes; if the other side has `ended` the connection it does not, so reading goes on."""
    cdef iovec[2] parts
    cdef uint64_t head_bytes = sizeof(engine_frame), direct
    cdef int64_t came
    cdef int _
    for _ in range(TURN):
        if not is_open(link):
            return False
        direct = head_bytes + link.coming.bytes - link.came if link.came >= head_bytes else 0
        if direct:
            parts[0].iov_base, parts[0].iov_len = link.target + (link.came - head_bytes), direct
        parts[1].iov_base, parts[1].iov_len = receiver.ahead, AHEAD
        came = engine_socket_receive(link.fd, &parts[0 if direct else 1], 2 if direct else 1)
        if came == ENGINE_SOCKET_SHORT and may_recover(link, &link.in_starved):
            return False
        if came > 0:
            link.in_starved = 0
            store_relaxed(&link.in_bytes, link.in_bytes + <uint64_t>came)
        if came > 0 and direct and not take_in(link, receiver, min(<uint64_t>came, direct)):
            came = -EPROTO
        elif came > 0 and <uint64_t>came > direct and not take_over(link, receiver, <uint64_t>came - direct):
            came = -EPROTO
        if came < 0:
            came = <int>load32_relaxed(<uint32_t*>&link.unsent) or came
            cas32(<uint32_t*>&link.state, <uint32_t>OPEN, <uint32_t>came)
        if came <= 0 or (<uint64_t>came < direct + AHEAD and not ended):
            return False
    return True
