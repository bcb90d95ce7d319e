"""The ring of schedule entries. Positions are in words since the start and never wrap; places in the ring do."""
from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memset

from engine_ext.platform.atomics cimport load_acquire, store_release
from engine_ext.shared.layout cimport ENTRY_PAD, RING_WORDS, engine_entry

cdef extern from "platform/cpu.h" nogil:
    void engine_prefetch(const void* memory, size_t nbytes)
    void engine_prefetch_read(const void* memory, size_t nbytes)

cdef enum:
    USUAL_ENTRY = sizeof(engine_entry) + 8      # bytes of a BATCH of one or two tensors


cdef uint64_t schedule_slowest(Writer* writer) noexcept nogil:
    """The position that every rank has passed."""
    cdef uint64_t least = writer.tail, cursor
    cdef int r
    for r in range(writer.segment.size):
        cursor = load_acquire(&writer.segment.pages[r].cursor)     # pairs with schedule_advance: that rank has read the words
        if cursor < least:
            least = cursor
    return least


cdef engine_entry* schedule_reserve(Writer* writer, uint32_t words) noexcept nogil:
    """Room for an entry of `words`, zeroed; NULL when the slowest rank still needs that part of the ring."""
    cdef uint32_t place = <uint32_t>(writer.tail % RING_WORDS)
    cdef uint32_t left = RING_WORDS - place
    cdef uint32_t pad = left if left < words else 0
    cdef engine_entry* entry
    if writer.tail + pad + words - schedule_slowest(writer) > RING_WORDS:
        return NULL
    if pad:
        # A pad may be shorter than a header: its first word, size and type, is all that a reader looks at.
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
    engine_prefetch(&writer.segment.schedule[writer.tail % RING_WORDS], USUAL_ENTRY)   # other ranks have read what lies there


cdef engine_entry* schedule_next(Segment* segment) noexcept nogil:
    """The entry at this rank's cursor, or NULL."""
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
    """This rank is done with `entry`: the ring may reuse its words. `entry` is not read after this."""
    store_release(&segment.mine.cursor, segment.mine.cursor + entry.words)     # pairs with schedule_slowest
