"""The control plane between hosts (docs/architecture/protocol-hosts.md).

Every word of the protocol has one writer, so it can be copied over an ordered connection without any new agreement. The leader of
each host compares the pages of its crew with what it has sent, and sends what differs. The coordinator's host does the same with
the coordinator's page, the schedule, and what ranks of other hosts have to know of each other. What arrives is stored at the same
place of the page on this host. So coordinator, executor and reports read pages and do not know which of them are remote.

It does not matter which rank of the coordinator's host has a trunk, since all of them read and write the same pages. With few
hosts the coordinator's rank has all trunks. With many, the other ranks of its host share them (engine/net/rendezvous/layout.py),
and it only has to wake these.

Order, where it counts: requests, and values that vary per call, come before the bits that announce them. The bits come before the
cursor, so that behind an eviction or a join no old bit is read. The words that say "look" (`arrivals`, `waits`) come last. So
this host reads its own words in the opposite order.

Each message costs the coordinator's rank time. So a submission for which no thread waits yet may wait for the next ones: a leader
sends such news at most every quarter of a cycle, in a large world at most once a cycle.

relay_tell belongs to the holder of the driver's role; the handlers of what arrives (frame_handlers.pyx) belong to the reader.
"""
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memset

from engine_ext.hosts.frame_handlers cimport frame_handlers_open
from engine_ext.hosts.host_clock cimport host_clock_ask
from engine_ext.platform.atomics cimport (
    add32, load32_acquire, load32_relaxed, load_acquire, load_relaxed, now_ns, store32_relaxed, store_relaxed,
)
from engine_ext.platform.clock cimport overdue_ns, seconds_ns
from engine_ext.platform.posix cimport PAGE
from engine_ext.shared.layout cimport (
    COORDINATOR, ID_WORDS, KINDS, REASON_BYTES, REQUEST_BYTES, RING_WORDS, coordinator_page,
)
from engine_ext.shared.segment cimport nearby, wake_others
from engine_ext.transport.link cimport (
    FRAME_CAUSE, FRAME_LONGEST, FRAME_REQUESTS, FRAME_SCHEDULE, FRAME_WORDS, FRAME_WORDS_MOST, engine_failure_cause, engine_frame,
    link_break, link_flush, link_give, link_idle, link_queue,
)

cdef enum:
    CURSOR_SHARE = 16           # a cursor is sent, at the latest, when it has moved by this part of the ring
    PACES = 64                  # number of hosts from which on a leader's pace is a whole cycle
    SLOWEST = 16                # least number of hosts in that proportion: with fewer the pace is that of 16
    LONGEST_PACE_NS = 2000000   # longest pace of 16 hosts: a rank of another host may wait for what no thread waits for here

cdef extern from "<stdlib.h>" nogil:
    void* aligned_alloc(size_t alignment, size_t nbytes)

cdef extern from "<string.h>" nogil:
    void* memcpy(void* to, const void* source, size_t nbytes)


cdef bint relay_open(Relay* relay, Segment* segment) noexcept nogil:
    """Initialize the relay of a rank that has trunks, or coordinates. The caller sets `link` of the trunks. False without
    memory."""
    cdef int k, r
    cdef Trunk* trunk
    memset(relay, 0, sizeof(Relay))
    relay.segment = segment
    frame_handlers_open(relay)
    relay.count = 1 if segment.far else segment.hosts
    relay.trunks = <Trunk*>calloc(relay.count, sizeof(Trunk))
    relay.sent = <rank_page**>calloc(segment.size, sizeof(rank_page*))
    relay.states = <SentState*>calloc(segment.size, sizeof(SentState))
    relay.scanned = <uint64_t*>calloc(segment.size, 8)
    relay.passed = <uint64_t*>calloc(segment.size, 8)
    if (relay.trunks == NULL or relay.sent == NULL or relay.states == NULL or relay.scanned == NULL
            or relay.passed == NULL):
        return False
    for k in range(relay.count):
        trunk = &relay.trunks[k]
        trunk.host = segment.host_of[COORDINATOR] if segment.far else k
        trunk.crew = <int*>calloc(segment.size, sizeof(int))
        trunk.drained = <uint64_t*>calloc(segment.size, 8)
        trunk.buffer = <char*>malloc(FRAME_WORDS_MOST * sizeof(engine_word))
        if trunk.crew == NULL or trunk.drained == NULL or trunk.buffer == NULL:
            return False
        for r in range(segment.size):
            if segment.host_of[r] == trunk.host:
                trunk.crew[trunk.crew_size] = r
                trunk.crew_size += 1
    for r in range(segment.size):
        if segment.far and nearby(segment, r):
            relay.sent[r] = <rank_page*>aligned_alloc(PAGE, sizeof(rank_page))      # the type is aligned to pages
            if relay.sent[r] == NULL:
                return False
            memset(relay.sent[r], 0, sizeof(rank_page))
    return True


cdef void relay_close(Relay* relay) noexcept nogil:
    """Free the relay's memory."""
    cdef int k
    for k in range(relay.count if relay.trunks != NULL else 0):
        free(relay.trunks[k].crew)
        free(relay.trunks[k].drained)
        free(relay.trunks[k].buffer)
    for k in range(relay.segment.size if relay.sent != NULL else 0):
        free(relay.sent[k])
    free(relay.trunks)
    free(relay.sent)
    free(relay.states)
    free(relay.scanned)
    free(relay.passed)
    memset(relay, 0, sizeof(Relay))


# ---- words on their way out --------------------------------------------------------------------------------------------------

cdef void send_words(Words* words) noexcept nogil:
    """Send the collected words as one frame, and start a new list."""
    cdef engine_frame frame
    if words.count == 0:
        return
    memset(&frame, 0, sizeof(frame))
    frame.type, frame.rank, frame.bytes = FRAME_WORDS, words.rank, words.count * <uint32_t>sizeof(engine_word)
    link_give(words.trunk, &frame, <char*>words.list)
    words.list, words.count = NULL, 0


cdef void add_word(Words* words, uint64_t offset, uint32_t nbytes, uint64_t value) noexcept nogil:
    """Add a word to a list; a full list is sent. Without memory the trunk's connection is broken."""
    if words.count == FRAME_WORDS_MOST:
        send_words(words)
    if words.list == NULL:
        words.list = <engine_word*>malloc(FRAME_WORDS_MOST * sizeof(engine_word))
        if words.list == NULL:
            link_break(words.trunk)
            return
    words.list[words.count].offset, words.list[words.count].bytes = <uint32_t>offset, nbytes
    words.list[words.count].value = value
    words.count += 1


cdef inline uint64_t offset_in(const void* page, const void* field) noexcept nogil:
    """Return the offset of a field in its page, in bytes."""
    return <uint64_t>(<const char*>field - <const char*>page)


cdef inline void add_changed(Words* words, const void* page, const uint64_t* word, uint64_t* sent, uint64_t value) noexcept nogil:
    """Add a word of `page` to the list if `value` differs from `sent`, which is updated."""
    if value != sent[0]:
        sent[0] = value
        add_word(words, offset_in(page, word), 8, value)


cdef inline void add_changed_32(
    Words* words, const void* page, const uint32_t* word, uint32_t* sent, uint32_t value
) noexcept nogil:
    """Add a 32-bit word likewise."""
    if value != sent[0]:
        sent[0] = value
        add_word(words, offset_in(page, word), 4, value)


# ---- up: what the ranks of this host submit ----------------------------------------------------------------------------------

cdef void add_names(Words* words, const rank_page* page, rank_page* sent, uint64_t* ready, bint recording) noexcept nogil:
    """Add the words that go with the bits that have changed. `ready`: the bits, as they were read."""
    cdef uint64_t changed, w, id
    for w in range(ID_WORDS):
        add_changed(words, page, &page.absent[w], &sent.absent[w], load_relaxed(&page.absent[w]))
        add_changed(words, page, &page.awaited[w], &sent.awaited[w], load_relaxed(&page.awaited[w]))
        # A rank that stands in toggles bits, too: behind a join the same bit may mean another submission.
        changed = <uint64_t>-1 if sent.joined else ready[w] ^ sent.ready[w]
        while changed:
            id = w * 64 + <uint64_t>count_trailing_zeros(changed)
            changed &= changed - 1
            add_changed(words, page, &page.rows[id], &sent.rows[id], load_relaxed(&page.rows[id]))
            if recording:
                add_changed(words, page, &page.brought[id], &sent.brought[id], load_relaxed(&page.brought[id]))

cdef extern from * nogil:
    """
    #define count_trailing_zeros(x) __builtin_ctzll(x)
    """
    int count_trailing_zeros(uint64_t x)


cdef void send_requests(Words* words, const rank_page* page, uint64_t begin, uint64_t end) noexcept nogil:
    """Send bytes of a request ring, before the word that announces them. They stay there until the coordinator has read them."""
    cdef engine_frame frame
    cdef uint64_t place
    while begin < end:
        place = begin % REQUEST_BYTES
        memset(&frame, 0, sizeof(frame))
        frame.type, frame.rank, frame.position = FRAME_REQUESTS, words.rank, begin
        frame.bytes = <uint32_t>min(end - begin, REQUEST_BYTES - place)
        link_queue(words.trunk, &frame, <const char*>page.requests + place)
        begin += frame.bytes


cdef void add_state(Words* words, const rank_page* page, rank_page* sent) noexcept nogil:
    """Add the words of a rank's state that depend on no other words."""
    cdef int kind
    add_changed(words, page, &page.steps, &sent.steps, load_relaxed(&page.steps))
    add_changed_32(words, page, &page.wait_requests, &sent.wait_requests, load32_relaxed(&page.wait_requests))
    add_changed_32(words, page, &page.blocked, &sent.blocked, load32_relaxed(&page.blocked))
    add_changed_32(words, page, &page.blocked_anywhere, &sent.blocked_anywhere, load32_relaxed(&page.blocked_anywhere))
    for kind in range(KINDS):
        add_changed(words, page, &page.unnamed[kind], &sent.unnamed[kind], load_relaxed(&page.unnamed[kind]))
    add_changed_32(words, page, &page.overdue, &sent.overdue, load32_relaxed(&page.overdue))


cdef int news_of(const Relay* relay, int rank) noexcept nogil:
    """Return what the coordinator has to know of a rank of this host: NO_NEWS, NEWS or URGENT_NEWS."""
    cdef const rank_page* page = relay.segment.pages[rank]
    cdef const rank_page* sent = relay.sent[rank]
    cdef uint64_t cursor = load_acquire(&page.cursor)
    if (load_acquire(&page.waits) != sent.waits or load_acquire(&page.request_head) != sent.request_head
            or load_acquire(&page.waits_unnamed) != sent.waits_unnamed or load_acquire(&page.joined) != sent.joined
            or load32_relaxed(&page.wait_all) != sent.wait_all or load32_relaxed(&page.wait_requests) != sent.wait_requests
            or load32_relaxed(&page.blocked) != sent.blocked or load32_relaxed(&page.overdue) != sent.overdue
            or load32_relaxed(&page.blocked_anywhere) != sent.blocked_anywhere):
        return URGENT_NEWS
    # A cursor is sent with the next bits, unless the coordinator waits for it or may soon have to.
    if cursor != sent.cursor and (
            load32_acquire(&relay.segment.coordinator.schedule_full) or cursor - sent.cursor >= RING_WORDS // CURSOR_SHARE):
        return URGENT_NEWS
    return NEWS if load_acquire(&page.arrivals) != sent.arrivals or load_relaxed(&page.steps) != sent.steps else NO_NEWS


cdef void send_up(Relay* relay, Trunk* trunk, int rank) noexcept nogil:
    """Send the coordinator's host the words of a rank of this host that have changed."""
    cdef const rank_page* page = relay.segment.pages[rank]
    cdef rank_page* sent = relay.sent[rank]
    cdef uint64_t[ID_WORDS] ready
    # In the opposite order of announce_op(): words that were written before these are seen after them.
    cdef uint64_t cursor = load_acquire(&page.cursor), joined = load_acquire(&page.joined)
    cdef uint64_t joined_at = load_relaxed(&page.joined_at), waits = load_acquire(&page.waits)
    cdef uint64_t arrivals = load_acquire(&page.arrivals), waits_unnamed = load_acquire(&page.waits_unnamed), head, w
    cdef uint32_t wait_all
    cdef bint named = arrivals != sent.arrivals or waits != sent.waits or cursor != sent.cursor
    cdef Words words
    memset(&words, 0, sizeof(words))
    words.rank, words.trunk = rank, trunk.link
    for w in range(ID_WORDS if named else 0):
        ready[w] = load_acquire(&page.ready[w])
    head = load_acquire(&page.request_head)
    wait_all = load32_acquire(&page.wait_all)
    if load_acquire(&page.waits) != waits or load_acquire(&page.arrivals) != arrivals:
        wait_all = 0                # a wait may have begun or ended meanwhile, so the bits may not fit: the next look sends it
    if wait_all == 0 or waits != sent.waits:
        add_changed_32(&words, page, &page.wait_all, &sent.wait_all, 0)     # before the bits of a rank that waits anew or no more
    if named:
        add_names(&words, page, sent, ready, load32_relaxed(&relay.segment.coordinator.recording) != 0)
    add_state(&words, page, sent)
    if head != sent.request_head:
        send_words(&words)
        send_requests(&words, page, sent.request_head, head)
        add_changed(&words, page, &page.request_head, &sent.request_head, head)
    for w in range(ID_WORDS if named else 0):
        add_changed(&words, page, &page.ready[w], &sent.ready[w], ready[w])
    add_changed_32(&words, page, &page.wait_all, &sent.wait_all, wait_all)      # behind all that the rank has submitted
    # Behind numbers and bits: it says that they stay.
    add_changed(&words, page, &page.waits_unnamed, &sent.waits_unnamed, waits_unnamed)
    add_changed(&words, page, &page.joined_at, &sent.joined_at, joined_at)
    add_changed(&words, page, &page.joined, &sent.joined, joined)
    add_changed(&words, page, &page.arrivals, &sent.arrivals, arrivals)
    add_changed(&words, page, &page.waits, &sent.waits, waits)
    add_changed(&words, page, &page.cursor, &sent.cursor, cursor)
    send_words(&words)
    store_relaxed(&relay.scanned[rank], arrivals + waits + head)
    store_relaxed(&relay.passed[rank], cursor)


cdef bint relay_unseen(const Relay* relay) noexcept nogil:
    """Return whether there is something to send since the last look. On the coordinator's host that is what other hosts need;
    elsewhere what a rank of this host has for the coordinator, of cursors only while it waits for them."""
    cdef const Segment* segment = relay.segment
    cdef const rank_page* page
    cdef int i, r
    if not segment.far:
        return (load_acquire(&segment.coordinator.tail) != load_relaxed(&relay.tail)
                or drained_by_all(segment) != load_relaxed(&relay.drained)
                or flags_of(segment.coordinator) != load_relaxed(&relay.flags)
                or load32_acquire(&segment.header.state_notices) != load32_relaxed(&relay.state_notices))
    for i in range(segment.crew_size):
        r = segment.crew[i]
        page = segment.pages[r]
        if load_acquire(&page.arrivals) + load_acquire(&page.waits) + load_acquire(&page.request_head) != (
                load_relaxed(&relay.scanned[r])):
            return True
        if load32_acquire(&segment.coordinator.schedule_full) and load_acquire(&page.cursor) != load_relaxed(&relay.passed[r]):
            return True
    return False


# ---- down: what the coordinator has decided ----------------------------------------------------------------------------------

cdef void send_schedule(Relay* relay, Trunk* trunk) noexcept nogil:
    """Send the new words of the schedule. They stay in the ring until every rank of that host has passed them."""
    cdef uint64_t tail = load_acquire(&relay.segment.coordinator.tail), place
    cdef engine_frame frame
    while trunk.tail < tail:
        place = trunk.tail % RING_WORDS
        memset(&frame, 0, sizeof(frame))
        frame.type, frame.position = FRAME_SCHEDULE, trunk.tail
        frame.bytes = <uint32_t>min(min(tail - trunk.tail, RING_WORDS - place) * 8, <uint64_t>FRAME_LONGEST)
        link_queue(trunk.link, &frame, <const char*>&relay.segment.schedule[place])
        trunk.tail += frame.bytes // 8


cdef void note_rank_state(Relay* relay, int rank) noexcept nogil:
    """Note a rank's state, and a new change if it differs from what was sent."""
    cdef const rank_page* page = relay.segment.pages[rank]
    cdef SentState* sent = &relay.states[rank]
    cdef uint64_t waits_unnamed = load_acquire(&page.waits_unnamed), joined = load_acquire(&page.joined)
    cdef uint64_t joined_at = load_relaxed(&page.joined_at)
    cdef uint32_t blocked = load32_relaxed(&page.blocked), anywhere = load32_relaxed(&page.blocked_anywhere)
    if (waits_unnamed != sent.waits_unnamed or joined != sent.joined or joined_at != sent.joined_at or blocked != sent.blocked
            or anywhere != sent.blocked_anywhere):
        relay.changes += 1
        sent.change, sent.waits_unnamed, sent.joined, sent.joined_at = relay.changes, waits_unnamed, joined, joined_at
        sent.blocked, sent.blocked_anywhere = blocked, anywhere


cdef uint64_t drained_by_all(const Segment* segment) noexcept nogil:
    """Return the bytes that were read of all request rings together."""
    cdef uint64_t drained = 0
    cdef int r
    for r in range(segment.size):
        drained += load_acquire(&segment.coordinator.drained[r])
    return drained


cdef inline uint64_t flags_of(const coordinator_page* page) noexcept nogil:
    """Return the flags of the coordinator's page as bits: recording, schedule_full, over."""
    return load32_relaxed(&page.recording) | load32_relaxed(&page.schedule_full) << 1 | load32_acquire(&page.over) << 2


cdef void note_changes(Relay* relay) noexcept nogil:
    """Note whether anything has changed that other hosts have to know. Changes of ranks elsewhere have arrived from there."""
    cdef Segment* segment = relay.segment
    cdef uint64_t tail = load_acquire(&segment.coordinator.tail), drained = drained_by_all(segment)
    cdef uint64_t flags = flags_of(segment.coordinator), changes = relay.changes
    cdef uint32_t state_notices = load32_acquire(&segment.header.state_notices)         # before the states: pairs with note_news
    cdef int i
    if state_notices != relay.state_notices:
        store32_relaxed(&relay.state_notices, state_notices)
        for i in range(segment.size):
            note_rank_state(relay, i)
    else:
        for i in range(segment.crew_size):
            note_rank_state(relay, segment.crew[i])
    if tail != relay.tail or drained != relay.drained or flags != relay.flags or changes != relay.changes:
        store_relaxed(&relay.tail, tail)
        store_relaxed(&relay.drained, drained)
        store_relaxed(&relay.flags, flags)
        relay.version += 1
        if not relay.keeps:                 # the rank with the trunks reads the words itself, and the states after a notice
            if changes != relay.changes:
                add32(&segment.header.state_notices, 1)
            wake_others(segment, 0)


cdef void add_rank_state(Words* words, const rank_page* page) noexcept nogil:
    """Add what ranks of other hosts have to know of a rank. Its submissions count only while its one thread waits."""
    cdef uint64_t waits_unnamed = load_acquire(&page.waits_unnamed), joined = load_acquire(&page.joined), w
    cdef int kind
    add_word(words, offset_in(page, &page.joined_at), 8, load_relaxed(&page.joined_at))
    add_word(words, offset_in(page, &page.joined), 8, joined)
    add_word(words, offset_in(page, &page.blocked), 4, load32_relaxed(&page.blocked))
    add_word(words, offset_in(page, &page.blocked_anywhere), 4, load32_relaxed(&page.blocked_anywhere))
    if waits_unnamed:
        for kind in range(KINDS):
            add_word(words, offset_in(page, &page.unnamed[kind]), 8, load_relaxed(&page.unnamed[kind]))
        for w in range(ID_WORDS):
            add_word(words, offset_in(page, &page.ready[w]), 8, load_relaxed(&page.ready[w]))
    add_word(words, offset_in(page, &page.waits_unnamed), 8, waits_unnamed)


cdef void send_down(Relay* relay, Trunk* trunk) noexcept nogil:
    """Send a host what has changed at the coordinator, and of ranks of other hosts."""
    cdef Segment* segment = relay.segment
    cdef const coordinator_page* page = segment.coordinator
    cdef uint32_t over = load32_acquire(&page.over)         # read before the end of the schedule
    cdef Words words
    cdef int i, r
    memset(&words, 0, sizeof(words))
    words.rank, words.trunk = -1, trunk.link
    for i in range(trunk.crew_size):
        r = trunk.crew[i]
        add_changed(&words, page, &page.drained[r], &trunk.drained[r], load_acquire(&page.drained[r]))
    add_changed_32(&words, page, &page.recording, &trunk.recording, load32_relaxed(&page.recording))
    add_changed_32(&words, page, &page.schedule_full, &trunk.schedule_full, load32_relaxed(&page.schedule_full))
    send_words(&words)
    send_schedule(relay, trunk)
    add_changed_32(&words, page, &page.over, &trunk.over, over)
    send_words(&words)
    for r in range(segment.size if trunk.changes != relay.changes else 0):
        if segment.host_of[r] != trunk.host and relay.states[r].change > trunk.changes:
            words.rank = r
            add_rank_state(&words, segment.pages[r])
            send_words(&words)
    trunk.changes, trunk.version = relay.changes, relay.version


# ---- both --------------------------------------------------------------------------------------------------------------------

cdef void send_failure_cause(Relay* relay, Trunk* trunk) noexcept nogil:
    """Send the failure cause, which only the coordinator's host decides; another leader sends its host's claim."""
    cdef uint64_t word = load_acquire(relay.segment.claim)      # pairs with abort_world: the reason is written
    cdef engine_frame frame
    cdef engine_failure_cause* cause
    if word == 0 or trunk.cause_sent or relay.segment.world != relay.segment:      # a process set fails with its world
        return
    trunk.cause_sent = 1
    cause = <engine_failure_cause*>calloc(1, sizeof(engine_failure_cause))
    if cause == NULL:
        return                      # the other host sees that the connection ends
    cause.abort = word
    memcpy(cause.reason, relay.segment.world.pages[word >> 32].reason, REASON_BYTES)
    memset(&frame, 0, sizeof(frame))
    frame.type, frame.bytes = FRAME_CAUSE, sizeof(engine_failure_cause)
    link_give(trunk.link, &frame, <char*>cause)


cdef void send_crew_changes(Relay* relay, Trunk* trunk) noexcept nogil:
    """Send the coordinator's rank what has changed on this host. News that no thread waits for is sent together with later
    news."""
    cdef int news = NO_NEWS, i
    cdef uint64_t now
    relay.delayed_until = 0
    if link_idle(trunk.link):
        host_clock_ask(&relay.clock, trunk.link)
    for i in range(relay.segment.crew_size):
        news = max(news, news_of(relay, relay.segment.crew[i]))
    if news == NO_NEWS:
        return
    now = now_ns()
    if news == NEWS and relay.pace and not overdue_ns(now, relay.sent_at, relay.pace):
        relay.delayed_until = relay.sent_at + relay.pace
        return
    if not link_idle(trunk.link):
        return                      # once it is, the network thread wakes this rank
    relay.sent_at = now
    for i in range(relay.segment.crew_size):
        send_up(relay, trunk, relay.segment.crew[i])
    link_flush(trunk.link)


cdef inline uint64_t compute_pace(int hosts, uint64_t cycle_ns) noexcept nogil:
    """Return the nanoseconds between two times at which a host's leader sends changes that no thread waits for."""
    cdef uint64_t slow = <uint64_t>max(hosts, SLOWEST)
    return min(cycle_ns * min(slow, <uint64_t>PACES) // PACES, LONGEST_PACE_NS * slow // SLOWEST)


cdef void relay_tell(Relay* relay, double cycle_time_ms) noexcept nogil:
    """Send what has changed over this rank's trunks. A trunk that has not sent the last changes yet gets later ones together."""
    cdef Segment* segment = relay.segment
    cdef Trunk* trunk
    cdef int k
    if not segment.far:
        note_changes(relay)
    store_relaxed(&relay.pace, compute_pace(segment.hosts, seconds_ns(cycle_time_ms / 1e3)))
    for k in range(relay.count):
        trunk = &relay.trunks[k]
        if trunk.link == NULL:
            continue
        if segment.far:
            send_crew_changes(relay, trunk)
        elif trunk.version != relay.version and link_idle(trunk.link):
            send_down(relay, trunk)
            link_flush(trunk.link)
        # Behind the schedule: when a rank has only left, the entries in it are still executed.
        if (not trunk.cause_sent and load_acquire(segment.claim) != 0 and link_idle(trunk.link)
                and (segment.far or trunk.version == relay.version)):
            send_failure_cause(relay, trunk)
            link_flush(trunk.link)
