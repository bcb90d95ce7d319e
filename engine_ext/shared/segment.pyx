"""Make, map and leave control segments; declare a world failed."""
from libc.errno cimport EEXIST, ENOMEM, EPROTO, errno
from libc.stdlib cimport calloc, free
from libc.string cimport memset, strncpy

from engine_ext.platform.atomics cimport add32, add64, cas, cas32, load_acquire, store_release
from engine_ext.platform.hash cimport fnv, fnv_begin
from engine_ext.platform.posix cimport (
    MADV_DONTFORK, MAP_FAILED, MAP_NORESERVE, MAP_SHARED, PAGE, PROT_READ, PROT_WRITE, close, madvise, mmap, munmap,
    pwrite,
)
from engine_ext.shared.crews cimport crew_size
from engine_ext.shared.layout cimport (
    ENGINE_PROTOCOL, ENTRY_PAD, REASON_BYTES, RING_WORDS, SEGMENT_MAGIC, engine_layout, segment_bytes,
    segment_coordinator, segment_page, segment_schedule,
)

cdef extern from "platform/memory.h" nogil:
    int engine_memory_file(const char* name)

cdef extern from "<fcntl.h>" nogil:
    enum: FALLOC_FL_PUNCH_HOLE, FALLOC_FL_KEEP_SIZE
    int fallocate(int fd, int mode, long offset, long length)


cdef int write_header(int fd, uint64_t offset, int size, uint32_t generation) noexcept nogil:
    """Make the file long enough for a segment at `offset`, and write its header. Return 0 or -errno."""
    cdef segment_header* header
    cdef uint64_t bytes = segment_bytes(<uint32_t>size)
    if pwrite(fd, b"", 1, <long>(offset + bytes) - 1) != 1:       # never shorter: others append at the same time
        return -errno
    header = <segment_header*>mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, <long>offset)
    if <void*>header == MAP_FAILED:
        return -errno
    header.magic, header.layout, header.bytes = SEGMENT_MAGIC, engine_layout(), bytes
    header.protocol, header.size, header.generation, header.end = ENGINE_PROTOCOL, <uint32_t>size, generation, bytes
    munmap(header, PAGE)
    return 0


cdef int segment_create(int size, uint32_t generation) noexcept nogil:
    """Make a memory file with a control segment for `size` ranks. Return its descriptor, or -errno."""
    cdef int fd = engine_memory_file(b"engine-control")
    cdef int status
    if fd < 0:
        return fd
    status = write_header(fd, 0, size, generation)
    if status < 0:
        close(fd)
        return status
    return fd


cdef int segment_append(Segment* world, int fd, int size, uint64_t* offset) noexcept nogil:
    """Append a segment for a process set of `size` ranks to the world's file; `offset` receives its start. Return 0 or -errno.
    One rank of the host calls it, before the others map; several sets may be appended at the same time."""
    offset[0] = add64(&world.header.end, segment_bytes(<uint32_t>size))
    return write_header(fd, offset[0], size, world.header.generation)


cdef int segment_map(
    Segment* segment, int fd, uint64_t offset, int rank, int size, const int* host_of
) noexcept nogil:
    """Map the segment at `offset` of `fd`. Return 0, -errno, or -EPROTO if it has another layout or size. `host_of`: the number
    of each rank's host; NULL: there is one host."""
    cdef uint64_t bytes = segment_bytes(<uint32_t>size)
    cdef void* base
    cdef segment_header* header
    cdef int r
    memset(segment, 0, sizeof(Segment))
    base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, <long>offset)
    if base == MAP_FAILED:
        return -errno
    header = <segment_header*>base
    if (header.magic != SEGMENT_MAGIC or header.layout != engine_layout() or header.bytes != bytes
            or header.protocol != ENGINE_PROTOCOL or header.size != <uint32_t>size):
        munmap(base, bytes)
        return -EPROTO
    madvise(base, bytes, MADV_DONTFORK)      # a forked child must not find the world's words (protocol, rule 14)
    segment.rank, segment.size, segment.header = rank, size, header
    segment.pages = <rank_page**>calloc(size, sizeof(rank_page*))
    segment.numbers = <int*>calloc(size, sizeof(int))
    if not crews_open(&segment.crews, host_of, size) or segment.pages == NULL or segment.numbers == NULL:
        segment_unmap(segment)
        return -ENOMEM
    segment.hosts, segment.host_of = segment.crews.hosts, segment.crews.host_of
    segment.crew = segment.crews.members + segment.crews.first[segment.host_of[rank]]
    segment.crew_size = crew_size(&segment.crews, segment.host_of[rank])
    segment.leader, segment.far = segment.crew[0], not nearby(segment, COORDINATOR)
    segment.world, segment.abort = segment, &header.abort
    segment.claim = &header.abort if nearby(segment, COORDINATOR) else &header.claim
    segment.coordinator = segment_coordinator(header)
    segment.schedule = segment_schedule(header)
    for r in range(size):
        segment.pages[r], segment.numbers[r] = segment_page(header, r), r
    segment.mine = segment.pages[rank]
    return 0


cdef int segment_enter(Segment* segment, Segment* world, const int* numbers) noexcept nogil:
    """Make a mapped segment a process set's. `numbers`: the world's numbers of its ranks. Return 0, -EPROTO if other ranks
    entered it as another set, or -EEXIST if this rank has entered it before."""
    cdef uint64_t digest = fnv_begin()
    cdef int r
    for r in range(segment.size):
        segment.numbers[r] = numbers[r]
        digest = fnv(digest, <uint64_t>numbers[r])
    digest |= 1                         # never 0, which means that no rank has entered
    segment.world, segment.abort, segment.claim = world, world.abort, world.claim
    if not cas(&segment.header.members, 0, digest) and load_acquire(&segment.header.members) != digest:
        return -EPROTO
    return 0 if cas32(&segment.mine.entered, 0, 1) else -EEXIST


cdef void segment_leave(Segment* segment, int fd, uint64_t offset) noexcept nogil:
    """Note that this rank no longer touches the segment of a process set. The last rank of the host gives its memory back;
    segments behind it in the file stay where they are."""
    # Acquire and release: the last rank comes after all that the others have written.
    if add32(&segment.header.closed, 1) + 1 == <uint32_t>segment.crew_size:
        fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, <long>offset, <long>segment_bytes(<uint32_t>segment.size))


cdef void segment_unmap(Segment* segment) noexcept nogil:
    """Unmap a segment, and free what belongs to it."""
    if segment.header != NULL:
        munmap(segment.header, segment_bytes(<uint32_t>segment.size))
        free(segment.pages)
        free(segment.numbers)
        crews_close(&segment.crews)
        memset(segment, 0, sizeof(Segment))


cdef void wake_everybody(Segment* segment) noexcept nogil:
    """Wake every thread that sleeps at a door of any rank of this host, after an abort."""
    cdef int i
    for i in range(segment.crew_size):
        ring_both(segment, segment.crew[i])


cdef bint abort_world(Segment* segment, int culprit, int cause, const char* text) noexcept nogil:
    """Declare the world failed. The first failure of a host is one compare-and-swap; return whether this was it. A process set
    fails with its world.

    On the coordinator's host it is the world's failure at once. Elsewhere it is a claim, which the leader sends there.

    The text is in place before the word that makes it readable. One process writes its reason once: the text of a later failure
    is never read.
    """
    cdef Segment* world = segment.world
    cdef uint64_t word = <uint64_t>(segment.numbers[culprit] + 1) | <uint64_t>cause << 16 | <uint64_t>world.rank << 32
    cdef bint first = False
    if cas32(&world.reason_claimed, 0, 1):
        strncpy(world.mine.reason, text, REASON_BYTES - 1)
        world.mine.reason[REASON_BYTES - 1] = 0
        first = cas(world.claim, 0, word)               # release: pairs with the acquire of the reader of the reason
    wake_everybody(world)
    return first


cdef void settle_claim(Segment* segment) noexcept nogil:
    """Accept this host's claim as the world's failure, because no host can be asked to judge it."""
    cdef Segment* world = segment.world
    if claimed(world) and cas(world.abort, 0, load_acquire(world.claim)):
        wake_everybody(world)


# ---- the schedule -----------------------------------------------------------------------------------------------------------

# The ring of schedule entries. Positions count words since the start and never wrap; places in the ring do.

cdef extern from "platform/cpu.h" nogil:
    void engine_prefetch(const void* memory, size_t nbytes)
    void engine_prefetch_read(const void* memory, size_t nbytes)

cdef enum:
    USUAL_ENTRY = sizeof(engine_entry) + 8      # bytes of a BATCH of one or two tensors


cdef uint64_t schedule_slowest(Writer* writer) noexcept nogil:
    """Return the position that every rank has passed."""
    cdef uint64_t least = writer.tail, cursor
    cdef int r
    for r in range(writer.segment.size):
        cursor = load_acquire(&writer.segment.pages[r].cursor)     # pairs with schedule_advance: that rank has read the words
        if cursor < least:
            least = cursor
    return least


cdef engine_entry* schedule_reserve(Writer* writer, uint32_t words) noexcept nogil:
    """Return room for an entry of `words`, zeroed; NULL while the slowest rank needs that part of the ring."""
    cdef uint32_t place = <uint32_t>(writer.tail % RING_WORDS)
    cdef uint32_t left = RING_WORDS - place
    cdef uint32_t pad = left if left < words else 0
    cdef engine_entry* entry
    if writer.tail + pad + words - schedule_slowest(writer) > RING_WORDS:
        return NULL
    if pad:
        # A pad may be shorter than a header: a reader looks only at its first word, which has size and type.
        writer.segment.schedule[place] = 0
        entry = <engine_entry*>&writer.segment.schedule[place]
        entry.words, entry.type = pad, ENTRY_PAD
        writer.tail += pad
        store_release(&writer.segment.coordinator.tail, writer.tail)
        place = 0
    entry = <engine_entry*>&writer.segment.schedule[place]
    memset(entry, 0, words * 8)
    entry.words = words
    return entry


cdef void schedule_append(Writer* writer, engine_entry* entry) noexcept nogil:
    """Publish a reserved entry. The caller wakes the ranks."""
    entry.sequence = writer.sequence
    writer.sequence += 1
    writer.tail += entry.words
    store_release(&writer.segment.coordinator.tail, writer.tail)   # pairs with schedule_next
    engine_prefetch(&writer.segment.schedule[writer.tail % RING_WORDS], USUAL_ENTRY)   # other ranks have read that place before


cdef engine_entry* schedule_next(Segment* segment) noexcept nogil:
    """Return the entry at this rank's cursor, past any pads; NULL: there is none."""
    cdef engine_entry* entry
    cdef uint64_t cursor = segment.mine.cursor
    cdef uint64_t tail = load_acquire(&segment.coordinator.tail)   # pairs with schedule_append
    while cursor < tail:
        entry = <engine_entry*>&segment.schedule[cursor % RING_WORDS]
        engine_prefetch_read(entry, USUAL_ENTRY)
        if entry.type != ENTRY_PAD:
            return entry
        cursor += entry.words
        store_release(&segment.mine.cursor, cursor)
    return NULL


cdef void schedule_advance(Segment* segment, const engine_entry* entry) noexcept nogil:
    """Move this rank's cursor past `entry`: the ring may reuse its words, so it is not read after this."""
    store_release(&segment.mine.cursor, segment.mine.cursor + entry.words)     # pairs with schedule_slowest


# ---- crews ------------------------------------------------------------------------------------------------------------------

# Crews: which ranks share a host. No other code counts them.

cdef bint crews_open(Crews* crews, const int* host_of, int size) noexcept nogil:
    """Count the ranks of each host. `host_of`: the number of each rank's host; NULL: there is one host. False without memory."""
    cdef int r, h, count
    memset(crews, 0, sizeof(Crews))
    crews.size, crews.hosts, crews.smallest, crews.consecutive = size, 1, size, True
    crews.host_of = <int*>calloc(size, sizeof(int))
    crews.place_of = <int*>calloc(size, sizeof(int))
    crews.members = <int*>calloc(size, sizeof(int))
    crews.first = <int*>calloc(size + 1, sizeof(int))
    if crews.host_of == NULL or crews.place_of == NULL or crews.members == NULL or crews.first == NULL:
        crews_close(crews)
        return False
    for r in range(size):
        crews.host_of[r] = host_of[r] if host_of != NULL else 0
        crews.hosts = max(crews.hosts, crews.host_of[r] + 1)
        crews.consecutive = crews.consecutive and (r == 0 or crews.host_of[r] >= crews.host_of[r - 1])
    for h in range(crews.hosts):
        count = 0
        for r in range(size):
            if crews.host_of[r] == h:
                crews.members[crews.first[h] + count], crews.place_of[r] = r, count
                count += 1
        crews.first[h + 1] = crews.first[h] + count
        crews.largest, crews.smallest = max(crews.largest, count), min(crews.smallest, count)
    return True


cdef void crews_close(Crews* crews) noexcept nogil:
    free(crews.host_of)
    free(crews.place_of)
    free(crews.members)
    free(crews.first)
    memset(crews, 0, sizeof(Crews))
