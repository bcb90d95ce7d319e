"""Eviction of ids: names that no rank has submitted for long are forgotten by all ranks, and requested anew if need be.

The caller holds rank 0's driver role.
"""
from libc.stdint cimport uint64_t

from engine_ext.coordinator.coordinator cimport EVICTIONS, NameState, stamp
from engine_ext.coordinator.requests cimport requests_forget
from engine_ext.shared.layout cimport ENTRY_EVICT, IDS, engine_entry
from engine_ext.shared.schedule cimport schedule_append, schedule_reserve, schedule_slowest
from engine_ext.shared.segment cimport bit

cdef enum:
    SAMPLE = 64                 # idle names, of which the one that was used longest ago goes


cdef NameState* oldest_idle(Coordinator* c) noexcept nogil:
    """The name that was used longest ago among a sample of those that no rank has submitted; NULL: there is none."""
    cdef NameState* name
    cdef NameState* oldest = NULL
    cdef int tried = 0, found = 0, r
    cdef bint idle
    while tried < IDS and found < SAMPLE:
        c.clock_hand = (c.clock_hand + 1) % IDS
        tried += 1
        name = c.by_id[c.clock_hand]
        if name == NULL or name.listed or bit(c.queued, name.id):
            continue
        idle = True
        for r in range(c.segment.size):
            if bit(c.segment.pages[r].ready, name.id) != bit(c.phase, name.id):
                idle = False
                break
        if idle:
            found += 1
            if oldest == NULL or name.used < oldest.used:
                oldest = name
    return oldest


cdef void eviction_begin(Coordinator* c, int wanted) noexcept nogil:
    """Start to free `wanted` ids, or as many as are idle; nothing while earlier ones are on their way."""
    cdef engine_entry* entry
    cdef NameState* name
    if c.evicting_count:
        return
    while c.evicting_count < min(wanted, <int>EVICTIONS):
        name = oldest_idle(c)
        entry = schedule_reserve(&c.writer, sizeof(engine_entry) // 8) if name != NULL else NULL
        if entry == NULL:
            break
        entry.type, entry.id = ENTRY_EVICT, name.id
        stamp(c, entry)
        schedule_append(&c.writer, entry)
        c.evicting[c.evicting_count], c.evicted_at = name.id, c.writer.tail
        c.evicting_count += 1
        c.defined[name.id >> 6] &= ~(<uint64_t>1 << (name.id & 63))
        c.by_id[name.id] = NULL
        requests_forget(c, name)


cdef void eviction_end(Coordinator* c) noexcept nogil:
    """Free the ids that are on their way, if every rank has forgotten them (I5)."""
    if schedule_slowest(&c.writer) >= c.evicted_at:
        while c.evicting_count:
            c.evicting_count -= 1
            c.free_ids[c.free_count] = c.evicting[c.evicting_count]
            c.free_count += 1
