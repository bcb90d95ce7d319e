"""Handlers of the frames that arrive over trunks: each is stored at the same place of this host's segment. The reader
(connections.pxd) alone calls them.

Not every frame is worth a wake-up. A submission on another host for which no thread waits can be looked at together with what
other hosts send next.
"""
from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memcpy

from engine_ext.hosts.host_clock cimport host_clock_answer, host_clock_receive
from engine_ext.hosts.relay cimport NEWS, URGENT_NEWS, Trunk
from engine_ext.hosts.validation cimport entries_are_valid, range_is_valid, requests_are_valid, rows_are_valid
from engine_ext.platform.atomics cimport (
    add32, cas, load32_acquire, load_acquire, load_relaxed, store32_release, store_release,
)
from engine_ext.shared.layout cimport (
    CAUSES, CAUSE_NONE, IDS, KINDS, REASON_BYTES, REQUEST_BYTES, RING_WORDS, UNNAMED_SHIFT, rank_page,
)
from engine_ext.shared.segment cimport Segment, nearby, wake_everybody
from engine_ext.transport.link cimport (
    FRAME_CAUSE, FRAME_CLOCK, FRAME_LEFT, FRAME_REQUESTS, FRAME_SCHEDULE, FRAME_WORDS, FRAME_WORDS_MOST, Link,
    engine_failure_cause, engine_frame, engine_times, engine_word, engine_word_of_coordinator, engine_word_of_rank,
    link_acknowledge_end,
)


cdef void frame_handlers_open(Relay* relay) noexcept nogil:
    """Set the relay's handlers of received frames."""
    relay.receiver.find_target, relay.receiver.handle_frame, relay.receiver.owner = find_target, handle_frame, relay


cdef inline uint64_t offset_in(const void* page, const void* field) noexcept nogil:
    """Return the offset of a field in its page, in bytes."""
    return <uint64_t>(<const char*>field - <const char*>page)


cdef Trunk* trunk_of(Relay* relay, const Link* link) noexcept nogil:
    """Return the trunk of a link."""
    return &relay.trunks[0 if relay.segment.far else relay.segment.host_of[link.peer]]


cdef bint of_host(const Segment* segment, int rank, int host) noexcept nogil:
    return 0 <= rank < segment.size and segment.host_of[rank] == host


cdef bint of_another_host(const Segment* segment, int rank) noexcept nogil:
    return 0 <= rank < segment.size and not nearby(segment, rank)


cdef uint64_t slowest_nearby(const Segment* segment) noexcept nogil:
    """Return the schedule position that every rank of this host has passed."""
    cdef uint64_t least = <uint64_t>-1
    cdef int i
    for i in range(segment.crew_size):
        least = min(least, load_acquire(&segment.pages[segment.crew[i]].cursor))
    return least


cdef char* find_target(void* owner, Link* link, const engine_frame* frame) noexcept nogil:
    """Return where the bytes of a frame are stored: at their place in the segment, or in the trunk's buffer. NULL: the frame is
    invalid."""
    cdef Relay* relay = <Relay*>owner
    cdef Segment* segment = relay.segment
    cdef Trunk* trunk = trunk_of(relay, link)
    cdef bint down = segment.far
    cdef uint64_t place
    if frame.type == FRAME_WORDS:
        if frame.bytes % sizeof(engine_word) or frame.bytes > FRAME_WORDS_MOST * sizeof(engine_word):
            return NULL
        if (of_another_host(segment, frame.rank) or frame.rank == -1) if down else of_host(segment, frame.rank, trunk.host):
            return trunk.buffer
    elif (frame.type == FRAME_CAUSE and frame.bytes == sizeof(engine_failure_cause)) or (
            frame.type == FRAME_CLOCK and frame.bytes == sizeof(engine_times)) or (
            frame.type == FRAME_LEFT and frame.bytes == 0):
        return trunk.buffer
    elif frame.type == FRAME_REQUESTS and not down and of_host(segment, frame.rank, trunk.host):
        place = frame.position % REQUEST_BYTES
        if (frame.position >= load_relaxed(&segment.pages[frame.rank].request_head) and place + frame.bytes <= REQUEST_BYTES
                and range_is_valid(frame.position, frame.bytes, load_acquire(&segment.coordinator.drained[frame.rank]),
                                   REQUEST_BYTES)):
            return <char*>segment.pages[frame.rank].requests + place
    elif frame.type == FRAME_SCHEDULE and down:
        place = frame.position % RING_WORDS
        if (frame.position == load_relaxed(&segment.coordinator.tail) and frame.bytes % 8 == 0
                and place + frame.bytes // 8 <= RING_WORDS
                and range_is_valid(frame.position, frame.bytes // 8, slowest_nearby(segment), RING_WORDS)):
            return <char*>&segment.schedule[place]
    return NULL


cdef bint word_is_valid(const Segment* segment, int rank, const engine_word* word) noexcept nogil:
    """Check a word that is used as an index or a length. The requests up to a new `request_head` have arrived."""
    cdef const rank_page* page = segment.pages[rank]
    cdef uint64_t head = load_relaxed(&page.request_head)
    if word.offset == offset_in(page, &page.request_head):
        return (range_is_valid(word.value, 0, load_acquire(&segment.coordinator.drained[rank]), REQUEST_BYTES)
                and requests_are_valid(segment, rank, head, word.value))
    if word.offset == offset_in(page, &page.overdue):
        return word.value == 0 or 1 <= word.value >> 1 <= IDS
    if word.offset == offset_in(page, &page.waits_unnamed):
        return word.value == 0 or 1 <= word.value >> UNNAMED_SHIFT <= KINDS
    if offset_in(page, &page.rows[0]) <= word.offset < offset_in(page, &page.brought[0]):
        return rows_are_valid(word.value)
    return True


cdef bint is_quiet(const Segment* segment, const rank_page* page, const engine_word* word) noexcept nogil:
    """Return whether a rank's word can be looked at later: its submissions while no thread waits for them, and its progress."""
    if word.offset >= offset_in(page, &page.ready[0]) or word.offset == offset_in(page, &page.arrivals):
        return True
    if word.offset == offset_in(page, &page.cursor):
        return load32_acquire(&segment.coordinator.schedule_full) == 0
    return word.offset == offset_in(page, &page.steps) or (
        offset_in(page, &page.unnamed[0]) <= word.offset < offset_in(page, &page.waits_unnamed))


cdef void note_news(Relay* relay, const engine_frame* frame, const engine_word* words, uint32_t count) noexcept nogil:
    """Note that words were stored. On the coordinator's host, ranks of further hosts may need those that are not quiet."""
    cdef uint32_t k
    if relay.segment.far:
        relay.news = URGENT_NEWS
        return
    relay.news = max(relay.news, NEWS)
    for k in range(count):
        if not is_quiet(relay.segment, relay.segment.pages[frame.rank], &words[k]):
            relay.news = URGENT_NEWS
            add32(&relay.segment.header.state_notices, 1)   # pairs with note_changes: the words are stored
            return


cdef bint coordinator_word_is_valid(const Segment* segment, const engine_word* word) noexcept nogil:
    """Check a word of the coordinator's page: how far it has read a rank's requests, or a flag."""
    cdef uint64_t rank = (word.offset - offset_in(segment.coordinator, segment.coordinator.drained)) // 8
    if word.bytes == 4:
        return word.value <= 1
    return nearby(segment, <int>rank) and (
        load_relaxed(&segment.coordinator.drained[rank]) <= word.value <= load_acquire(&segment.pages[rank].request_head))


cdef bint store_words(const Segment* segment, int rank, const engine_word* words, uint32_t count) noexcept nogil:
    """Store words of a rank's page, or, for -1, of the coordinator's. False if one of them is invalid."""
    cdef char* page = <char*>segment.pages[rank] if rank >= 0 else <char*>segment.coordinator
    cdef uint32_t k
    for k in range(count):
        if rank >= 0:
            if not engine_word_of_rank(&words[k]) or not word_is_valid(segment, rank, &words[k]):
                return False
        elif not engine_word_of_coordinator(&words[k], segment.size) or not coordinator_word_is_valid(segment, &words[k]):
            return False
        if words[k].bytes == 8:
            store_release(<uint64_t*>(page + words[k].offset), words[k].value)
        else:
            store32_release(<uint32_t*>(page + words[k].offset), <uint32_t>words[k].value)
    return True


cdef bint handle_failure_cause(Relay* relay, Trunk* trunk, engine_failure_cause* cause) noexcept nogil:
    """Store a failure cause. On the coordinator's host the first claim becomes the cause; elsewhere the cause is final. False if
    it is invalid."""
    cdef Segment* world = relay.segment.world
    cdef uint64_t culprit = (cause.abort & 0xFFFF) - 1, reporter = cause.abort >> 32
    if culprit >= <uint64_t>world.size or reporter >= <uint64_t>world.size or world != relay.segment:
        return False
    if not CAUSE_NONE < cause.abort >> 16 & 0xFFFF < CAUSES or (not world.far and world.host_of[reporter] != trunk.host):
        return False
    cause.reason[REASON_BYTES - 1] = 0                # terminated before other ranks may read it
    if not nearby(world, <int>reporter):
        memcpy(world.pages[reporter].reason, cause.reason, REASON_BYTES)
    if cas(world.abort, 0, cause.abort):              # release: pairs with the acquire of the reader of the reason
        wake_everybody(world)
    return True


cdef bint handle_frame(void* owner, Link* link, const engine_frame* frame) noexcept nogil:
    """Handle a frame that has arrived whole. False: it is invalid, and its connection ends."""
    cdef Relay* relay = <Relay*>owner
    cdef Segment* segment = relay.segment
    cdef Trunk* trunk = trunk_of(relay, link)
    cdef uint32_t count
    if frame.type == FRAME_SCHEDULE:
        if not entries_are_valid(segment, &segment.schedule[frame.position % RING_WORDS], frame.bytes // 8):
            return False
        relay.news = URGENT_NEWS
        store_release(&segment.coordinator.tail, frame.position + frame.bytes // 8)     # pairs with schedule_next
    elif frame.type == FRAME_WORDS:
        count = frame.bytes // <uint32_t>sizeof(engine_word)
        if not store_words(segment, frame.rank, <engine_word*>trunk.buffer, count):
            return False
        note_news(relay, frame, <engine_word*>trunk.buffer, count)
    elif frame.type == FRAME_CAUSE:
        return handle_failure_cause(relay, trunk, <engine_failure_cause*>trunk.buffer)
    elif frame.type == FRAME_CLOCK and not segment.far:
        relay.news = URGENT_NEWS                # the driver may have found the connection busy with the answer
        host_clock_answer(<const engine_times*>trunk.buffer, link)
    elif frame.type == FRAME_CLOCK:
        relay.news = max(relay.news, NEWS)      # the same, with the next question
        return host_clock_receive(&relay.clock, segment, <const engine_times*>trunk.buffer, link)
    elif frame.type == FRAME_LEFT:
        link_acknowledge_end(link)
        if segment.far:             # the coordinator's host sends this last: no entry comes any more
            store32_release(&segment.coordinator.over, 1)
            relay.news = URGENT_NEWS
    return True
