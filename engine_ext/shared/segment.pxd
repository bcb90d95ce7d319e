"""The mapped control segment of a world, or of a process set: where the words are, and how to wake who waits on them."""
from libc.stdint cimport int32_t, uint32_t, uint64_t

from engine_ext.platform.atomics cimport (
    FENCE_WAKE, add32, count_up, full_fence, load32_acquire, load32_relaxed, load_acquire, load_pointer, load_relaxed,
)
from engine_ext.platform.doors cimport door_ring
from engine_ext.shared.crews cimport Crews
from engine_ext.shared.layout cimport (
    ARRIVAL_LAST_BITS, ARRIVAL_WAIT_BITS, CAUSE_LEFT, COORDINATOR, DOOR_THREAD, SLEEP_COUNT_SHIFT, SLEEP_DOORS, SLEEP_ENGINE,
    SLEEP_WAITER, coordinator_page, engine_entry, rank_page, segment_header,
)

cdef enum:
    GROUP_NAME_BYTES = 64       # most bytes of a group's name

cdef struct Segment:
    int rank
    int size
    Crews crews                 # which ranks share a host, and so a segment
    int hosts                   # number of hosts, each with a segment of its own
    int* host_of                # by rank: the number of its host; that of rank 0 is 0
    int* crew                   # the ranks that share this segment, in order; the pages of others are written by relays
    int crew_size
    bint far                    # the coordinator is on another host
    int leader                  # the first of the crew: whom to wake for the coordinator, which it runs or relays to
    int* numbers                # what the world calls each rank: the rank itself, but in a process set
    Segment* world              # the world's segment: this one, but of a process set
    const char* group_name      # atomic: what reports call a process set, which torch calls so; kept by the engine; NULL: none
    uint64_t* abort             # the world's word: sets fail with it
    uint64_t* claim             # the world's word in which a host claims its first failure: `abort` on the coordinator's host
    segment_header* header
    coordinator_page* coordinator
    uint64_t* schedule
    rank_page** pages           # by rank
    rank_page* mine
    uint32_t reason_claimed     # this process has written its reason; the world's alone
    uint32_t joins              # atomic: number of joins that have ended on all ranks, as this rank knows
    uint64_t wakes              # futex calls made to wake somebody; statistics

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
    """What reports call a process set; NULL: it has no name."""
    return <const char*>load_pointer(<void**>&segment.group_name)       # pairs with the setter of Engine.group_name

cdef inline bint coordinates(const Segment* segment) noexcept nogil:
    """Whether this rank runs the coordinator."""
    return segment.rank == COORDINATOR

cdef inline bint nearby(const Segment* segment, int rank) noexcept nogil:
    """Whether `rank` is on this rank's host, and shares its segment."""
    return segment.host_of[rank] == segment.host_of[segment.rank]

cdef inline bint claimed(const Segment* segment) noexcept nogil:
    """Whether a failure is claimed on this host, which the coordinator's host has yet to judge."""
    return segment.claim != segment.abort and load_acquire(segment.claim) != 0 and load_acquire(segment.abort) == 0

cdef inline int place_of(const Segment* segment, int number) noexcept nogil:
    """The rank here of a rank of the world; -1: it is not here."""
    cdef int r
    for r in range(segment.size):
        if segment.numbers[r] == number:
            return r
    return -1

cdef inline bint relays(const Segment* segment) noexcept nogil:
    """Whether this rank speaks for its host with the coordinator, which is on another."""
    return segment.rank == segment.leader and not nearby(segment, COORDINATOR)

cdef inline bint clocked(const Segment* segment) noexcept nogil:
    """Whether this host's clock has been compared with the coordinator's."""
    return not segment.far or load32_acquire(&segment.header.clocked) != 0      # pairs with host_clock_receive

cdef inline uint64_t ahead_ns(const Segment* segment) noexcept nogil:
    """What to add, modulo 2^64, to a time of this host's clock for that of the coordinator's; 0 as long as it is not known."""
    return load_relaxed(&segment.header.ahead) if segment.far else 0

cdef inline uint64_t to_coordinator_time(const Segment* segment, uint64_t ns) noexcept nogil:
    """Convert a time of this host's clock to the coordinator's; 0: the offset is not known."""
    return ns + ahead_ns(segment) if clocked(segment) else 0

cdef inline uint64_t from_coordinator_time(const Segment* segment, uint64_t ns) noexcept nogil:
    """Convert a time of the coordinator's clock to this host's; 0: there is none, or the offset is not known."""
    return ns - ahead_ns(segment) if ns != 0 and clocked(segment) else 0

cdef inline bint visible(const Segment* segment, int rank) noexcept nogil:
    """Whether this rank sees which names `rank` submits: on its own host, and where the coordinator is, of all."""
    return nearby(segment, rank) or nearby(segment, COORDINATOR)

cdef inline bint gone(const Segment* segment, int rank) noexcept nogil:
    """Whether `rank` has left and nothing of it is still on its way: the schedule may come later than its FRAME_LEFT."""
    return load32_acquire(&segment.pages[rank].left) and (
        rank != COORDINATOR or load32_acquire(&segment.coordinator.over) != 0)

cdef inline bint world_left(const Segment* segment) noexcept nogil:
    """Whether the world has ended because a rank left: in order, and behind all that it took part in."""
    return <int>(load_acquire(segment.abort) >> 16 & 0xFFFF) == CAUSE_LEFT      # pairs with abort_world

cdef inline bint away(const Segment* segment, int rank) noexcept nogil:
    """Whether `rank` has joined: it submits nothing, and is waited for by nobody."""
    return load_relaxed(&segment.pages[rank].joined) > load32_relaxed(&segment.joins)

cdef inline bint elsewhere(const Segment* segment, int rank) noexcept nogil:
    """Whether a thread of `rank` waits in another process set, or in the world: then it is kept waiting itself."""
    cdef const rank_page* world = segment.world.pages[segment.numbers[rank]]
    return load32_relaxed(&world.blocked_anywhere) > load32_relaxed(&segment.pages[rank].blocked)

cdef inline void ring(Segment* segment, int rank, uint32_t door) noexcept nogil:
    """Wake who sleeps at a door of `rank`: at most one thread. The engine thread sleeps in the world's segment for all engines of
    its process, and drives those whose own door has moved."""
    cdef rank_page* page = segment.pages[rank]
    if door == SLEEP_ENGINE:
        add32(&page.door[SLEEP_ENGINE], 1)      # before the thread's door is rung: pairs with engine_thread
        page, door = segment.world.pages[segment.numbers[rank]], DOOR_THREAD
    door_ring(&page.door[door], 1)

cdef inline void ring_both(Segment* segment, int rank) noexcept nogil:
    """Wake every thread that sleeps at a door of `rank`, whatever `asleep` says."""
    ring(segment, rank, SLEEP_ENGINE)
    ring(segment, rank, SLEEP_WAITER)

cdef inline void wake_unfenced(Segment* segment, int rank, uint32_t only) noexcept nogil:
    """Wake `rank` if it sleeps and, when `only` is not 0, has announced one of those reasons. The caller has fenced since it
    made true what `rank` may be waiting for.

    Nobody rings twice for one sleep: if the door's count has moved since the announcement, the sleeper is on its way, and
    announces and looks again before it sleeps again.
    """
    cdef rank_page* page = segment.pages[rank]
    cdef uint32_t asleep = load32_relaxed(&page.asleep)
    cdef uint32_t door = asleep & SLEEP_DOORS
    if door != 0 and (only == 0 or asleep & only) and (
            (load32_relaxed(&page.door[door]) ^ asleep >> SLEEP_COUNT_SHIFT) << SLEEP_COUNT_SHIFT == 0):
        ring(segment, rank, door)
        count_up(&segment.wakes, 1)

cdef inline void wake(Segment* segment, int rank, uint32_t only) noexcept nogil:
    full_fence(FENCE_WAKE)                        # pairs with the fence after `asleep` is announced (I8)
    wake_unfenced(segment, rank, only)

cdef inline void wake_others(Segment* segment, uint32_t only) noexcept nogil:
    """Wake the other ranks that sleep, as wake() does."""
    cdef int i
    full_fence(FENCE_WAKE)                        # as in wake()
    for i in range(segment.crew_size):
        if segment.crew[i] != segment.rank:
            wake_unfenced(segment, segment.crew[i], only)

cdef inline bint bit(const uint64_t* words, int32_t id) noexcept nogil:
    """Bit `id` of an array of words that others write."""
    return (load_relaxed(&words[id >> 6]) >> (id & 63)) & 1

cdef struct Writer:
    Segment* segment
    uint64_t tail           # words appended, as published
    uint64_t sequence       # entries appended

cdef engine_entry* schedule_reserve(Writer* writer, uint32_t words) noexcept nogil
cdef void schedule_append(Writer* writer, engine_entry* entry) noexcept nogil
cdef uint64_t schedule_slowest(Writer* writer) noexcept nogil
cdef engine_entry* schedule_next(Segment* segment) noexcept nogil
cdef void schedule_advance(Segment* segment, const engine_entry* entry) noexcept nogil

# An arrival is a word: the rank that was last, plus 1 (0: not known); microseconds from when all ranks had submitted
# the tensor to when its batch was closed (saturating); microseconds from the first rank to the last (32 bits).

cdef inline int arrival_last(uint64_t arrival) noexcept nogil:
    """The rank, or -1."""
    return <int>(arrival & ((1 << ARRIVAL_LAST_BITS) - 1)) - 1

cdef inline uint64_t arrival_wait_us(uint64_t arrival) noexcept nogil:
    return arrival >> ARRIVAL_LAST_BITS & ((1 << ARRIVAL_WAIT_BITS) - 1)

cdef inline uint64_t arrival_late_us(uint64_t arrival) noexcept nogil:
    return arrival >> (ARRIVAL_LAST_BITS + ARRIVAL_WAIT_BITS)
