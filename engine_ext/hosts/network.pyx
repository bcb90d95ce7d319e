"""The network thread of a rank in a world of several hosts. It sleeps until a connection has news, takes that in, and wakes the
ranks of this host that it concerns. It never takes the GIL, and no thread waits for it. The holder of the driver's role sends
what goes out; this thread sends on what a connection did not take at once.

While a caller spins it takes in what comes in place of this thread: one of the two at a time is the reader
(docs/architecture/protocol-hosts-small.md).

A connection that ends is never mended. If the rank at its other end has not left, its end ends the world. For a trunk of the
world that is at once, since a better cause would have been sent before. For another connection it is when no cause has come for a
while.
"""
from libc.errno cimport EHOSTUNREACH, ENETUNREACH, ENOBUFS, ENOMEM, EPROTO, EREMOTEIO, ETIMEDOUT
from libc.stdint cimport uint32_t
from libc.stdio cimport snprintf
from libc.string cimport memcpy, strerror

from engine_ext.hosts.connections cimport READER_CALLER, READER_NONE, READER_THREAD, connections_delivered
from engine_ext.hosts.relay cimport NEWS, NO_NEWS, URGENT_NEWS, relay_open, relay_tell, relay_unseen
from engine_ext.operations.kinds cimport describe_ranks, fit
from engine_ext.platform.atomics cimport (
    add32, cas32, load32_acquire, load32_relaxed, load_acquire, load_relaxed, now_ns, store32_release,
)
from engine_ext.platform.clock cimport age_ns, overdue_ns
from engine_ext.platform.posix cimport engine_thread_start, nanosleep, timespec, write
from engine_ext.shared.layout cimport CAUSE_DIED, CAUSE_LOST, CAUSE_RAISED, MAX_RANKS, REASON_BYTES
from engine_ext.shared.segment cimport Segment, abort_world, settle_claim, wake, wake_others
from engine_ext.transport.lanes cimport (
    Lane, lane_is_cut, lane_is_delivered, lanes_doze, lanes_failure_cause, lanes_poll, lanes_send_failure_cause, lanes_wake,
)
from engine_ext.transport.link cimport (
    ENDED, OPEN, Link, engine_failure_cause, link_check_acks, link_flush, link_leave, link_receive, link_state,
)

cdef extern from "platform/sockets.h" nogil:
    int engine_socket_watch(int epoll, int fd, uint32_t number)
    int engine_socket_nest(int sleeper, int epoll)
    void engine_socket_hush(int sleeper, int epoll, bint quiet)
    bint engine_socket_sleep(int sleeper, int milliseconds)
    int engine_socket_look(int epoll, uint64_t* news, uint64_t* ended)

cdef enum:
    GRACE_NS = 1000000000       # wait for a better cause than "a connection ended"
    GRACE_LOOK_MS = 50          # milliseconds between two looks in that time
    POLL_NS = 200000            # nanoseconds between two looks of a rank that leaves
    FAILED_NS = 2000000000      # longest wait of a rank that leaves after a failure: a peer that does not answer then may be gone
    POLLS_AT_ONCE = 1000        # polls of the carrier without a pause, after a message has arrived; each yields the processor
    POLLS_SOON = 5000           # polls before the pauses become long
    SHORT_NAP_NS = 50000        # pause between polls, in nanoseconds, before POLLS_SOON of them
    LONG_NAP_NS = 1000000       # pause between polls after that
    WATCHES = 4                 # looks for acknowledgements in the time for which a trunk may be silent
    WATCH_MS = 1000             # longest time between two of these looks, in milliseconds
    STARVED_MS = 2              # milliseconds before a call for which the system had no memory is tried again
    NEWS_MS = 1                 # milliseconds for which news that no thread waits for is left, to be looked at with later news
    SHARED_NEWS_MS = 2          # the same where several ranks have trunks, each of which leaves its own news
    MANY_HOSTS = 16             # with more hosts, frames that arrive on trunks while such news is left are taken in together
    TOGETHER_NS = 250000        # nanoseconds for which they are collected

cdef extern from "<sched.h>" nogil:
    int sched_yield()


cdef int network_start(Network* network) noexcept nogil:
    """Start the network thread: 0 or an errno."""
    cdef Segment* segment = network.segment
    cdef int k, status
    if network.leads:
        if not relay_open(&network.relay, segment):
            return ENOMEM
        network.relay.keeps = network.count > network.lane_count
        for k in range(network.lane_count, network.count):
            network.relay.trunks[0 if segment.far else segment.host_of[network.links[k].peer]].link = &network.links[k]
    network.lanes.receiver.ahead = network.relay.receiver.ahead = network.ahead
    for k in range(network.count):
        status = engine_socket_watch(network.epoll, network.links[k].fd, <uint32_t>k)
        if status < 0:
            return -status
    status = engine_socket_nest(network.sleeper, network.epoll)
    if status == 0:
        status = engine_socket_watch(network.sleeper, network.bell, 1)
    if status == 0:
        status = -engine_thread_start(&network.thread, network_thread, network)
    network.threaded = status == 0
    return -status


# ---- what comes --------------------------------------------------------------------------------------------------------------

cdef void* network_thread(void* argument) noexcept nogil:
    """Run the network thread until `stop` is set."""
    cdef Network* network = <Network*>argument
    cdef timespec pause
    cdef uint64_t due = 0               # when the thread has to read by itself; 0: never
    cdef bint busy = False, collects = False, again = False, called
    pause.tv_sec, pause.tv_nsec = 0, TOGETHER_NS
    while not load32_acquire(&network.stop):
        if network.lanes.carrier != NULL:
            busy = not lanes_doze(&network.lanes)
            if busy:
                poll_carrier(network)
        if collects and not busy:
            nanosleep(&pause, NULL)
        called = not again and engine_socket_sleep(network.sleeper, 0 if busy else milliseconds_until(due))
        if network.lanes.carrier != NULL:
            lanes_wake(&network.lanes)
        if not cas32(&network.reader, READER_NONE, READER_THREAD):
            again = False
            if called:
                due = now_ns() + STARVED_MS * 1000000
                store32_release(&network.wanted, 1)     # no caller becomes the reader anew until this thread has read
            continue
        store32_release(&network.wanted, 0)
        retry_starved(network)
        again = read_links(network)         # until there is nothing left: each event is reported once
        wake_for_news(network)
        check_acks(network)
        report_lost_peer(network)
        due = next_look(network)
        collects = network.news_since != 0 and network.segment.hosts > MANY_HOSTS and not network.more
        store32_release(&network.reader, READER_NONE)
    return NULL


cdef bint read_links(Network* network) noexcept nogil:
    """Take in what has come on all links. Return whether anything has. The caller is the reader."""
    cdef int k
    if engine_socket_look(network.epoll, network.news, network.ended) <= 0 and not network.more:
        return False
    network.more = False
    for k in range(network.count):
        if network.news[k // 64] >> k % 64 & 1:
            network.news[k // 64] &= ~(<uint64_t>1 << k % 64)
            if serve_link(network, k):
                network.news[k // 64] |= <uint64_t>1 << k % 64
                network.more = True
    return True


cdef bint network_read(Network* network) noexcept nogil:
    """Become the reader, unless this thread already is, and take in what has come. Return whether anything has. The caller holds
    the driver's role, which give_back ends with the reading, and calls network_stop_reading before it sleeps."""
    cdef bint any
    if network.lanes.carrier != NULL or load32_relaxed(&network.wanted) or load32_relaxed(&network.starved):
        network_stop_reading(network)       # the network thread has to look
        return False
    if load32_relaxed(&network.reader) != READER_CALLER:
        if not cas32(&network.reader, READER_NONE, READER_CALLER):
            return False
        engine_socket_hush(network.sleeper, network.epoll, True)
    any = read_links(network)
    if network.relay.news == NEWS and network.segment.rank == network.segment.leader:
        network.relay.news, network.news_since = NO_NEWS, 0         # this thread drives, and looks at it next
    elif any:
        wake_for_news(network)
    return any


cdef void network_stop_reading(Network* network) noexcept nogil:
    """Have the network thread read again, if this thread, the holder of the driver's role, reads."""
    cdef uint64_t one = 1
    cdef bint timed
    if network == NULL or load32_relaxed(&network.reader) != READER_CALLER:
        return
    timed = network.more or network.news_since != 0 or network.lost_peer >= 0 or load32_relaxed(&network.starved) != 0
    store32_release(&network.reader, READER_NONE)
    engine_socket_hush(network.sleeper, network.epoll, False)
    if timed:
        write(network.bell, &one, 8)


cdef void poll_carrier(Network* network) noexcept nogil:
    """Let the carrier continue. No thread can sleep on it, so it is polled: without a pause at first, then every 50 microseconds.
    If that takes very long, since a rank stands still, it is polled every millisecond."""
    cdef timespec pause
    cdef int moved = lanes_poll(&network.lanes)
    notice_cut_lanes(network)
    if moved:
        network.idle_polls = 0
        return
    network.idle_polls += 1
    if network.idle_polls < POLLS_AT_ONCE:
        sched_yield()
    else:
        pause.tv_sec, pause.tv_nsec = 0, SHORT_NAP_NS if network.idle_polls < POLLS_SOON else LONG_NAP_NS
        nanosleep(&pause, NULL)


cdef inline int news_ms(const Network* network) noexcept nogil:
    """Return for how many milliseconds news that no thread waits for is left."""
    return NEWS_MS if network.segment.rank == network.segment.leader else SHARED_NEWS_MS


cdef inline int watch_ms(const Network* network) noexcept nogil:
    """Return the milliseconds between two looks for acknowledgements."""
    return min(<int>WATCH_MS, <int>network.trunk_silence_ms // WATCHES)


cdef uint64_t next_look(const Network* network) noexcept nogil:
    """Return when the network thread has to look again by itself: nanoseconds, monotonic; 0: never."""
    cdef int wait
    if load32_acquire(&network.starved):
        wait = STARVED_MS
    elif network.news_since:
        wait = news_ms(network)
    elif network.lost_peer >= 0:
        wait = GRACE_LOOK_MS
    elif load32_relaxed(&network.watching):
        wait = watch_ms(network)
    else:
        return 0
    return now_ns() + <uint64_t>wait * 1000000


cdef int milliseconds_until(uint64_t due) noexcept nogil:
    """Return the milliseconds from now to `due`, rounded up; -1 for 0."""
    return <int>((age_ns(due, now_ns()) + 999999) // 1000000) if due else -1


cdef void retry_starved(Network* network) noexcept nogil:
    """Try all links again if the system had no memory for one: nothing announces that it has some again."""
    cdef int k
    if load32_relaxed(&network.starved):
        store32_release(&network.starved, 0)    # cleared before the tries, which may set it
        network.more = True
        for k in range(network.count):
            network.news[k // 64] |= <uint64_t>1 << k % 64


cdef void wake_for_news(Network* network) noexcept nogil:
    """Wake the ranks that the last frames concern, once for all frames. News that no thread waits for is left for a moment, since
    more may come; only the coordinator's rank, or this host's leader, looks at it."""
    cdef int news = network.relay.news
    if news == NO_NEWS:
        return
    if news == NEWS:
        if network.news_since == 0:
            network.news_since = now_ns()
        if load_relaxed(&network.relay.pace) >= NEWS_MS * 1000000 and not overdue_ns(
                now_ns(), network.news_since, news_ms(network) * <uint64_t>1000000):
            return
        wake(network.segment, network.segment.leader, 0)
    else:
        wake_others(network.segment, 0)
        wake(network.segment, network.segment.rank, 0)
    network.relay.news, network.news_since = NO_NEWS, 0


cdef bint serve_link(Network* network, int k) noexcept nogil:
    """Take in what has arrived on a connection, and send on what waits there. Return whether there may be more to take in."""
    cdef Link* link = &network.links[k]
    cdef bint more, flushed = link_flush(link), ended = network.ended[k // 64] >> k % 64 & 1
    if k < network.lane_count:
        more = link_receive(link, &network.lanes.receiver, ended)
    else:
        more = link_receive(link, &network.relay.receiver, ended)
        if flushed:                     # the driver may have found it busy, and has more to send
            network.relay.news = URGENT_NEWS
    notice_end(network, k)
    return more


cdef int describe_host(const Segment* segment, int host, char* text, int room) noexcept nogil:
    """Write the ranks of a host. Return the length."""
    cdef bint[MAX_RANKS] those
    cdef int r
    for r in range(segment.size):
        those[r] = segment.host_of[r] == host
    return describe_ranks(those, segment.numbers, segment.size, text, room)


cdef void describe_end(const Segment* segment, const Link* link, bint cut, char* text) noexcept nogil:
    """Write why a connection has ended. `cut`: the carrier has failed on its lane."""
    cdef int at
    if cut or link_state(link) == -EREMOTEIO:
        at = fit(0, snprintf(text, REASON_BYTES, "the carrier of large tensors (the setting `lanes`) has failed between it and "),
                 REASON_BYTES)
        describe_host(segment, segment.host_of[segment.rank], text + at, REASON_BYTES - at)
    elif link_state(link) == ENDED:
        snprintf(text, REASON_BYTES, "its connection ended without a word: the process, its host or the network between is gone")
    elif link_state(link) == -ETIMEDOUT:
        at = fit(0, snprintf(text, REASON_BYTES, "its connection is silent: the host of "), REASON_BYTES)
        at += describe_host(segment, segment.host_of[link.peer], text + at, REASON_BYTES - at)
        at = fit(at, snprintf(text + at, REASON_BYTES - at, ", or the network between that and the host of "), REASON_BYTES)
        at += describe_host(segment, segment.host_of[segment.rank], text + at, REASON_BYTES - at)
        snprintf(text + at, REASON_BYTES - at, ", is gone")
    elif link_state(link) == -EPROTO:
        snprintf(text, REASON_BYTES,
                 "it has sent what no rank can mean, so its connection was ended: its memory or its engine is damaged")
    else:
        snprintf(text, REASON_BYTES, "its connection failed: %s", strerror(-link_state(link)))


cdef int cause_of_end(const Link* link) noexcept nogil:
    """Return the cause to report: a process that ends closes its connections; a host or a network that is lost closes none."""
    if link_state(link) == -EPROTO:
        return CAUSE_RAISED
    return CAUSE_LOST if link_state(link) in (-ETIMEDOUT, -EHOSTUNREACH, -ENETUNREACH) else CAUSE_DIED


cdef void check_acks(Network* network) noexcept nogil:
    """Check whether what was sent is acknowledged, as long as something is not or more is sent. The kernel's own limits do not
    help: they are very long, or do not tell a stopped process, which takes nothing, from a cut cable."""
    cdef uint64_t now
    cdef bint owed = False
    cdef int k
    if not load32_relaxed(&network.sent_any) and not load32_relaxed(&network.watching):
        return
    now = now_ns()
    if not overdue_ns(now, network.watched_at, watch_ms(network) * <uint64_t>1000000):
        store32_release(&network.watching, 1)   # the look comes then
        return
    network.watched_at = now
    store32_release(&network.sent_any, 0)
    for k in range(network.count):
        owed |= link_check_acks(
            &network.links[k], network.lane_silence_ms if k < network.lane_count else network.trunk_silence_ms)
        notice_end(network, k)
    store32_release(&network.watching, owed)
    if add32(&network.sent_any, 0):               # a read-modify-write orders it behind `watching`; pairs with network_rest
        store32_release(&network.watching, 1)


cdef void network_rest(Network* network) noexcept nogil:
    """Have the network thread watch what this rank has sent. Called by the holder of the role, before it sleeps."""
    cdef uint64_t one = 1
    if network == NULL or not load32_relaxed(&network.sent_any):
        return
    if not add32(&network.watching, 0) or load32_acquire(&network.starved):
        write(network.bell, &one, 8)


cdef void notice_end(Network* network, int k) noexcept nogil:
    """Handle the end of a connection, once."""
    if link_state(&network.links[k]) != OPEN and not network.lost[k]:
        network.lost[k] = True
        handle_lost_link(network, k)


cdef bint is_cut(const Network* network, int k) noexcept nogil:
    """Return whether a connection belongs to a lane on which the carrier has failed while something is missing."""
    return k < network.lane_count and lane_is_cut(&network.list[k // network.list[0].count])


cdef inline bint has_closed(const Network* network) noexcept nogil:
    """Return whether this engine, or its world's, has been shut down here: pairs with the release in close."""
    return load32_acquire(&network.closed) or load32_acquire(&network.world.closed)


cdef void notice_cut_lanes(Network* network) noexcept nogil:
    """Look whether the carrier has failed on a lane. That is a failure even if the peer has left: what it had announced will not
    arrive."""
    cdef int k
    for k in range(network.lane_count):
        notice_end(network, k)
        if (is_cut(network, k) and network.lost_peer < 0 and load_acquire(network.segment.abort) == 0
                and not has_closed(network)):
            network.lost_peer, network.lost_at = network.links[k].peer, now_ns()


cdef void handle_lost_link(Network* network, int k) noexcept nogil:
    """End the world for a connection that has ended, or note its peer until a better cause comes."""
    cdef Link* link = &network.links[k]
    cdef Segment* world = network.segment.world
    cdef char[REASON_BYTES] text
    if load_acquire(network.segment.abort) != 0 or link.peer_ended or has_closed(network):
        return
    if link_state(link) == -ENOMEM or link_state(link) == -ENOBUFS:
        abort_world(world, world.rank, CAUSE_RAISED, b"it has no memory for what other hosts need")
        if k >= network.lane_count:
            settle_claim(network.segment)
        return
    if k < network.lane_count or network.world != network:
        if network.lost_peer < 0:
            network.lost_peer, network.lost_at = link.peer, now_ns()
        return
    describe_end(network.segment, link, False, text)
    abort_world(network.segment, link.peer, cause_of_end(link), text)
    settle_claim(network.segment)            # the connection to the judge has ended


cdef void report_lost_peer(Network* network) noexcept nogil:
    """Report the failure of a peer whose connection has ended, if rank 0's host has sent no cause meanwhile. A rank that ends
    after another's failure sends that cause before its connections end: that is no failure of its own."""
    cdef char[REASON_BYTES] text
    cdef const engine_failure_cause* cause
    cdef const Link* link
    cdef int k
    if network.lost_peer < 0 or not overdue_ns(now_ns(), network.lost_at, GRACE_NS):
        return
    if load32_acquire(&network.world.closed):       # its lanes are closed
        network.lost_peer = -1
        return
    cause = lanes_failure_cause(&network.world.lanes)
    if cause != NULL:
        abort_world(network.segment.world, <int>(cause.abort & 0xFFFF) - 1, <int>(cause.abort >> 16 & 0xFFFF), cause.reason)
        network.lost_peer = -1
        return
    for k in range(network.count):
        link = &network.links[k]
        if link.peer == network.lost_peer and (is_cut(network, k) or (network.lost[k] and not link.peer_ended)):
            describe_end(network.segment, link, is_cut(network, k), text)
            abort_world(network.segment, network.lost_peer, cause_of_end(link), text)
            break
    network.lost_peer = -1


# ---- what goes out ----------------------------------------------------------------------------------------------

cdef void network_relay(Network* network) noexcept nogil:
    """Send other hosts what is new. The caller holds the role, or there is no driver any more."""
    if network != NULL and network.leads:
        relay_tell(&network.relay, network.knobs.cycle_time_ms)


cdef uint64_t network_delayed_until(const Network* network) noexcept nogil:
    """Return when this rank has to relay what it holds back: nanoseconds, monotonic; 0: it holds nothing back."""
    return network.relay.delayed_until if network != NULL else 0


cdef bint network_unseen(Network* network) noexcept nogil:
    """Return whether this rank has something to relay that it has not looked at."""
    return network != NULL and network.leads and relay_unseen(&network.relay)


cdef void network_send_failure_cause(Network* network) noexcept nogil:
    """Send the failure cause to the ranks that have a lane with this one, because rank 0's host may be lost."""
    cdef engine_failure_cause cause
    cdef uint64_t word
    if network == NULL or network.world != network:
        return
    word = load_acquire(network.segment.abort)          # pairs with abort_world: the reason is written
    if word == 0:
        return
    cause.abort = word
    memcpy(cause.reason, network.segment.pages[word >> 32].reason, REASON_BYTES)
    lanes_send_failure_cause(&network.lanes, &cause)


cdef bint crew_has_left(const Network* network) noexcept nogil:
    """Return whether all ranks of this host have left."""
    cdef int i
    for i in range(network.segment.crew_size):
        if not load32_acquire(&network.segment.pages[network.segment.crew[i]].left):
            return False
    return True


cdef void leave_trunks(Network* network) noexcept nogil:
    """Say on each trunk that this rank is done."""
    cdef int k
    for k in range(network.lane_count, network.count):
        link_leave(&network.links[k])
        link_flush(&network.links[k])


cdef void report_undelivered(Network* network, const Lane* lane) noexcept nogil:
    """Report that the carrier has not sent what the peer waits for. In a process set the connection's end does that."""
    cdef char[REASON_BYTES] text
    if network.world == network and load_acquire(network.segment.abort) == 0:
        describe_end(network.segment, lane.links, True, text)
        abort_world(network.segment, lane.links.peer, CAUSE_DIED, text)
        network_send_failure_cause(network)


cdef bint leave_lanes(Network* network, bint last) noexcept nogil:
    """Say on each lane that this rank is done, once the carrier has sent what it was given: then all that was announced arrives.
    Return whether nothing is left to be said. After a failure lanes end without FRAME_LEFT: a peer that does not know of it yet
    waits a moment for the cause. `last`: no wait for the carrier any more."""
    cdef const Segment* segment = network.segment
    cdef Lane* lane
    cdef int n, k
    cdef bint whole = True
    for n in range(network.lane_count // network.list[0].count):
        lane = &network.list[n]
        if lane.left:
            continue
        if load_acquire(segment.claim) != 0 or load_acquire(segment.abort) != 0:
            return True
        if lane_is_delivered(lane):
            lane.left = True
            for k in range(lane.count):
                link_leave(&lane.links[k])
                link_flush(&lane.links[k])
        elif last or load32_acquire(&lane.failed):
            report_undelivered(network, lane)
        else:
            whole = False
    return whole


cdef void network_leave(Network* network, uint64_t ns) noexcept nogil:
    """Tell the other hosts that this rank is done, and wait until they have all that it sent: at most `ns`, and after a failure
    only a moment. A leader also relays for the other ranks of its host until they have left."""
    cdef uint64_t begun = now_ns()
    cdef Segment* segment
    cdef timespec pause
    cdef bint left = False, said
    if network == NULL:
        return
    segment = network.segment
    pause.tv_sec, pause.tv_nsec = 0, POLL_NS
    said = leave_lanes(network, False)
    while age_ns(now_ns(), begun) < (ns if load_acquire(segment.abort) == 0 else min(ns, <uint64_t>FAILED_NS)):
        network_relay(network)
        if not left and said and connections_delivered(network) and (
                not network.leads or crew_has_left(network) or load_acquire(segment.abort) != 0):
            network_relay(network)            # the latest news: the failure cause, if there is one
            leave_trunks(network)
            left = True
        if left and said and connections_delivered(network):
            return
        network_rest(network)                 # no other thread has the acknowledgements watched now
        nanosleep(&pause, NULL)
        said = leave_lanes(network, False)
    leave_lanes(network, True)
    if not left:
        network_relay(network)
        leave_trunks(network)
