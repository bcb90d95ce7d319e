"""The mapped control segment of a world, or of a process set: where its words are, and how to wake the ranks that wait on
them."""
from libc.stdint cimport int32_t, uint32_t, uint64_t

from engine_ext.platform.atomics cimport (
    FENCE_WAKE, add32, count_up, full_fence, load32_acquire, load32_relaxed, load_acquire, load_pointer, load_relaxed,
    store_relaxed, store_release,
)
from engine_ext.platform.doors cimport door_ring
from engine_ext.shared.crews cimport Crews
from engine_ext.shared.layout cimport (
    ARRIVAL_LAST_BITS, ARRIVAL_WAIT_BITS, CAUSE_LEFT, COORDINATOR, DOOR_THREAD, SLEEP_COUNT_SHIFT, SLEEP_DOORS, SLEEP_ENGINE,
    SLEEP_WAITER, coordinator_page, engine_entry, rank_page, segment_header,
)

cdef enum:
    GROUP_NAME_BYTES = 64       # most bytes of a group's name

cdef struct Segment:            # set as it is mapped and entered, but for the atomics
    int rank                    # this rank, as the segment numbers it
    int size
    Crews crews                 # the ranks of each host
    int hosts                   # number of hosts, each with a memory file of its own
    int* host_of                # by rank: the number of its host; the host of rank 0 is 0
    int* crew                   # the ranks of this host, in order; relays write the pages of the other ranks
    int crew_size
    bint far                    # whether the coordinator is on another host
    int leader                  # first rank of the crew, which coordinates or relays: wake it for the coordinator's attention
    int* numbers                # malloc'ed, by rank: the world's number of it; in the world's segment the rank itself
    Segment* world              # the world's segment; of the world: this one
    const char* group_name      # atomic: torch's name of a process set, for reports; kept by the engine; NULL: none
    uint64_t* abort             # atomic: the world's word, also of a process set, which fails with its world
    uint64_t* claim             # atomic: the world's word for this host's first failure; on the coordinator's host `abort`
    segment_header* header
    coordinator_page* coordinator
    uint64_t* schedule
    rank_page** pages           # by rank
    rank_page* mine             # this rank's page
    uint32_t reason_claimed     # atomic: 1 once this process has written its reason; in the world's segment alone
    uint32_t joins              # atomic: number of joins of all ranks that this rank knows to have ended; written by end_join
    uint64_t wakes              # number of futex calls made to wake other threads; statistics

cdef int segment_create(int size, uint32_t generation) noexcept nogil
cdef int segment_append(Segment* world, int fd, int size, uint64_t* offset) noexcept nogil
cdef int segment_map(
    Segment* segment, int fd, uint64_t offset, int rank, int size, const int* host_of
) noexcept nogil
cdef int segment_enter(Segment* segment, Segment* world, const int* numbers) noexcept nogil
cdef void segment_leave(Segment* segment, int fd, uint64_t offset) noexcept nogil
cdef void segment_unmap(Segment* segment) noexcept nogil
cdef bint abort_world(Segment* segment, int culprit, int cause, const char* text) noexcept nogil
cdef void settle_claim(Segment* segment) noexcept nogil
cdef void wake_everybody(Segment* segment) noexcept nogil

cdef bint crews_open(Crews* crews, const int* host_of, int size) noexcept nogil
cdef void crews_close(Crews* crews) noexcept nogil

cdef inline const char* group_name(Segment* segment) noexcept nogil:
    """Return the name that reports give a process set; NULL: it has none."""
    return <const char*>load_pointer(<void**>&segment.group_name)       # pairs with the setter of Engine.group_name

cdef inline bint coordinates(const Segment* segment) noexcept nogil:
    """Return whether this rank runs the coordinator."""
    return segment.rank == COORDINATOR

cdef inline bint nearby(const Segment* segment, int rank) noexcept nogil:
    """Return whether `rank` is on this rank's host, and shares its memory."""
    return segment.host_of[rank] == segment.host_of[segment.rank]

cdef inline bint claimed(const Segment* segment) noexcept nogil:
    """Return whether a failure is claimed on this host that the coordinator's host has not judged yet."""
    return segment.claim != segment.abort and load_acquire(segment.claim) != 0 and load_acquire(segment.abort) == 0

cdef inline int place_of(const Segment* segment, int number) noexcept nogil:
    """Return the rank here of a rank of the world; -1: it is not a member."""
    cdef int r
    for r in range(segment.size):
        if segment.numbers[r] == number:
            return r
    return -1

cdef inline bint relays(const Segment* segment) noexcept nogil:
    """Return whether this rank relays between its host and the coordinator, which is on another host."""
    return segment.rank == segment.leader and not nearby(segment, COORDINATOR)

cdef inline bint clocked(const Segment* segment) noexcept nogil:
    """Return whether this host's clock has been compared with the coordinator's."""
    return not segment.far or load32_acquire(&segment.header.clocked) != 0      # pairs with host_clock_receive

cdef inline uint64_t ahead_ns(const Segment* segment) noexcept nogil:
    """Return what turns a time of this host's clock into the coordinator's when it is added modulo 2^64; 0 while it is not
    known."""
    return load_relaxed(&segment.header.ahead) if segment.far else 0

cdef inline uint64_t to_coordinator_time(const Segment* segment, uint64_t ns) noexcept nogil:
    """Convert a time of this host's clock to the coordinator's; 0: the offset is not known."""
    return ns + ahead_ns(segment) if clocked(segment) else 0

cdef inline uint64_t from_coordinator_time(const Segment* segment, uint64_t ns) noexcept nogil:
    """Convert a time of the coordinator's clock to this host's; 0: there is none, or the offset is not known."""
    return ns - ahead_ns(segment) if ns != 0 and clocked(segment) else 0

cdef inline bint visible(const Segment* segment, int rank) noexcept nogil:
    """Return whether this rank sees which names `rank` submits: it sees all ranks on the coordinator's host, else those of its
    own host."""
    return nearby(segment, rank) or nearby(segment, COORDINATOR)

cdef inline bint gone(const Segment* segment, int rank) noexcept nogil:
    """Return whether `rank` has left and nothing of it is under way any more: the schedule may arrive later than its
    FRAME_LEFT."""
    return load32_acquire(&segment.pages[rank].left) and (
        rank != COORDINATOR or load32_acquire(&segment.coordinator.over) != 0)

cdef inline bint world_left(const Segment* segment) noexcept nogil:
    """Return whether the world has ended because a rank left: in order, after all that it took part in."""
    return <int>(load_acquire(segment.abort) >> 16 & 0xFFFF) == CAUSE_LEFT      # pairs with abort_world

cdef inline bint away(const Segment* segment, int rank) noexcept nogil:
    """Return whether `rank` has joined: it submits nothing, and no rank waits for it."""
    return load_relaxed(&segment.pages[rank].joined) > load32_relaxed(&segment.joins)

cdef inline bint elsewhere(const Segment* segment, int rank) noexcept nogil:
    """Return whether a thread of `rank` waits in another process set, or in the world: that rank is kept waiting itself."""
    cdef const rank_page* world = segment.world.pages[segment.numbers[rank]]
    return load32_relaxed(&world.blocked_anywhere) > load32_relaxed(&segment.pages[rank].blocked)

cdef inline int prefer_absentee(const Segment* segment, int absentee, int rank) noexcept nogil:
    """Return the rank to name of two that lack an operation: the first one that does not wait elsewhere, else the first.
    `absentee` is the one found before `rank`; -1: none."""
    return rank if absentee < 0 or (elsewhere(segment, absentee) and not elsewhere(segment, rank)) else absentee

cdef inline void ring(Segment* segment, int rank, uint32_t door) noexcept nogil:
    """Wake the thread that sleeps at a door of `rank`; at most one. The engine thread sleeps at one door in the world's segment
    for all engines of its process, and drives those whose own door has moved."""
    cdef rank_page* page = segment.pages[rank]
    if door == SLEEP_ENGINE:
        add32(&page.door[SLEEP_ENGINE], 1)      # before the thread's door: pairs with engine_thread
        page, door = segment.world.pages[segment.numbers[rank]], DOOR_THREAD
    door_ring(&page.door[door], 1)

cdef inline void ring_both(Segment* segment, int rank) noexcept nogil:
    """Wake every thread that sleeps at a door of `rank`, whatever `asleep` says."""
    ring(segment, rank, SLEEP_ENGINE)
    ring(segment, rank, SLEEP_WAITER)

cdef inline void wake_unfenced(Segment* segment, int rank, uint32_t only) noexcept nogil:
    """Wake `rank` if it sleeps and, unless `only` is 0, has announced one of those reasons. The caller has fenced since it wrote
    what `rank` may be waiting for.

    A sleep is rung for once. If the door's count has moved since the announcement, the sleeper is about to wake up, and announces
    and looks again before it sleeps again.
    """
    cdef rank_page* page = segment.pages[rank]
    cdef uint32_t asleep = load32_relaxed(&page.asleep)
    cdef uint32_t door = asleep & SLEEP_DOORS
    if door != 0 and (only == 0 or asleep & only) and (
            (load32_relaxed(&page.door[door]) ^ asleep >> SLEEP_COUNT_SHIFT) << SLEEP_COUNT_SHIFT == 0):
        ring(segment, rank, door)
        count_up(&segment.wakes, 1)

cdef inline void wake(Segment* segment, int rank, uint32_t only) noexcept nogil:
    """Wake `rank` as wake_unfenced does, after a fence."""
    full_fence(FENCE_WAKE)                        # pairs with the fence after `asleep` is announced (I8)
    wake_unfenced(segment, rank, only)

cdef inline void wake_others(Segment* segment, uint32_t only) noexcept nogil:
    """Wake the other ranks of this host that sleep, as wake() does."""
    cdef int i
    full_fence(FENCE_WAKE)                        # as in wake()
    for i in range(segment.crew_size):
        if segment.crew[i] != segment.rank:
            wake_unfenced(segment, segment.crew[i], only)

cdef inline bint bit(const uint64_t* words, int32_t id) noexcept nogil:
    """Return bit `id` of an array of words that other ranks write."""
    return (load_relaxed(&words[id >> 6]) >> (id & 63)) & 1

cdef inline uint64_t mask_of(int32_t id) noexcept nogil:
    """Return the mask of bit `id` in its word."""
    return <uint64_t>1 << (id & 63)

cdef inline void set_bit(uint64_t* words, int32_t id) noexcept nogil:
    """Set bit `id` of an array of words that one thread at a time uses; likewise the next two."""
    words[id >> 6] |= mask_of(id)

cdef inline void clear_bit(uint64_t* words, int32_t id) noexcept nogil:
    words[id >> 6] &= ~mask_of(id)

cdef inline void flip_bit(uint64_t* words, int32_t id) noexcept nogil:
    words[id >> 6] ^= mask_of(id)

cdef inline void flip_bit_relaxed(uint64_t* words, int32_t id) noexcept nogil:
    """Flip bit `id` of an array of words that this rank alone writes, and others read."""
    store_relaxed(&words[id >> 6], words[id >> 6] ^ mask_of(id))

cdef inline void flip_bit_release(uint64_t* words, int32_t id) noexcept nogil:
    """Flip bit `id` as flip_bit_relaxed does. A rank that acquires it sees all that was written before."""
    store_release(&words[id >> 6], words[id >> 6] ^ mask_of(id))

cdef struct Writer:         # the appending end of the schedule: the coordinator's
    Segment* segment
    uint64_t tail           # words appended and published
    uint64_t sequence       # entries appended

cdef engine_entry* schedule_reserve(Writer* writer, uint32_t words) noexcept nogil
cdef void schedule_append(Writer* writer, engine_entry* entry) noexcept nogil
cdef uint64_t schedule_slowest(Writer* writer) noexcept nogil
cdef engine_entry* schedule_next(Segment* segment) noexcept nogil
cdef void schedule_advance(Segment* segment, const engine_entry* entry) noexcept nogil

# An arrival is a word. From the low bits: the rank that was last, plus 1 (0: not known); microseconds from when all ranks had
# submitted the tensor to when its batch was closed (saturating); microseconds from the first rank to the last (32 bits).

cdef inline int arrival_last(uint64_t arrival) noexcept nogil:
    """Return the rank that was last, or -1."""
    return <int>(arrival & ((1 << ARRIVAL_LAST_BITS) - 1)) - 1

cdef inline uint64_t arrival_wait_us(uint64_t arrival) noexcept nogil:
    return arrival >> ARRIVAL_LAST_BITS & ((1 << ARRIVAL_WAIT_BITS) - 1)

cdef inline uint64_t arrival_late_us(uint64_t arrival) noexcept nogil:
    return arrival >> (ARRIVAL_LAST_BITS + ARRIVAL_WAIT_BITS)
