"""Requests of the ranks: the names that the coordinator knows, and the open requests for them.

The caller holds rank 0's driver role.
"""
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy

from engine_ext.coordinator.coordinator cimport EVICTIONS, Request, Turns, stamp, time_of_step, wanted
from engine_ext.coordinator.frozen cimport frozen_forget
from engine_ext.coordinator.names cimport Named, names_add, names_close, names_find, names_remove
from engine_ext.platform.atomics cimport store_release
from engine_ext.platform.clock cimport patience_at
from engine_ext.shared.layout cimport (
    CAUSE_RAISED, COORDINATOR, ENTRY_EVICT, ENTRY_TURN, FAULT_CALL, IDS, REQUEST_BYTES, engine_entry, engine_request, rank_page,
)
from engine_ext.shared.segment cimport abort_world, bit, clear_bit, schedule_append, schedule_reserve, schedule_slowest


cdef NameState* name_of(Coordinator* c, const char* text, uint32_t text_bytes) noexcept nogil:
    """Return the state of a name, made if it is new; NULL without memory."""
    cdef NameState* name = <NameState*>names_find(&c.names, text, text_bytes)
    if name == NULL:
        name = <NameState*>names_add(&c.names, text, text_bytes, sizeof(NameState))
        if name == NULL:
            return NULL
        name.requests = <Request**>calloc(c.segment.size, sizeof(Request*))
        if name.requests == NULL:
            names_remove(&c.names, <Named*>name)
            return NULL
    return name


cdef void requests_clear(Coordinator* c, NameState* name) noexcept nogil:
    """Free the open requests for a name, and remove it from the list of names with such."""
    cdef NameState** link
    cdef int r
    for r in range(c.segment.size):
        if name.requests[r] != NULL:
            free(name.requests[r].text)
        free(name.requests[r])
        name.requests[r] = NULL
    name.brought, name.failures, name.reported = 0, 0, False
    if name.listed:
        link = &c.open
        while link[0] != name:
            link = &link[0].next
        link[0] = name.next
        name.listed = False


cdef Request* keep_request(const engine_request* request) noexcept nogil:
    """Return a copy of a request, without its name; NULL without memory."""
    cdef Request* kept = <Request*>calloc(1, sizeof(Request))
    if kept == NULL:
        return NULL
    kept.meta, kept.rows, kept.absent = request.meta, request.rows, request.absent
    kept.submitted = request.submitted
    if request.meta.fault == FAULT_CALL:
        kept.text = <char*>malloc(request.text_bytes + 1)
        if kept.text == NULL:
            free(kept)
            return NULL
        memcpy(kept.text, <const char*>request + sizeof(engine_request) + request.name_bytes, request.text_bytes)
        kept.text[request.text_bytes] = 0
    return kept


cdef void requests_drain(Coordinator* c, int rank) noexcept nogil:
    """Take in the requests of one rank, in the order in which it made them."""
    cdef rank_page* page = c.segment.pages[rank]
    cdef uint64_t head = load_acquire(&page.request_head)           # pairs with write_request
    cdef uint64_t tail = c.request_tail[rank]
    cdef engine_request* request
    cdef Request* kept
    cdef NameState* name
    while tail < head:
        request = <engine_request*>(page.requests + tail % REQUEST_BYTES)
        if request.bytes == 0:
            tail += REQUEST_BYTES - tail % REQUEST_BYTES
            continue
        if request.turn:
            if not turns_note(c, request.turn):
                break
            tail += request.bytes
            continue
        name = name_of(c, <const char*>request + sizeof(engine_request), request.name_bytes)
        kept = keep_request(request) if name != NULL else NULL
        if kept == NULL:                # out of memory: it stays on the ring until the next step
            break
        if name.requests[rank] != NULL:         # only a rank of another host can have done that
            free(kept.text)
            free(kept)
            abort_world(c.segment, rank, CAUSE_RAISED, b"it has requested a name for which its request is open")
            break
        if rank == COORDINATOR and name.place == 0:
            c.places += 1
            name.place, name.number = c.places, request.optimizer
        name.requests[rank] = kept
        if name.brought == 0:
            name.next, c.open, name.listed = c.open, name, True
        if not wanted(name):
            name.since = patience_at(c.clock, time_of_step(c))
        name.brought += 1
        name.failures += kept.text != NULL
        tail += request.bytes
    c.request_tail[rank], c.drained = tail, True
    store_release(&c.segment.coordinator.drained[rank], tail)       # pairs with room_for_request: the bytes may be reused


cdef void free_name(void* coordinator, Named* named) noexcept nogil:
    """Free the memory that a name's state owns."""
    cdef NameState* name = <NameState*>named
    requests_clear(<Coordinator*>coordinator, name)
    free(name.requests)
    free(name.rows)


cdef void requests_forget(Coordinator* c, NameState* name) noexcept nogil:
    """Remove a name without open requests from the table."""
    frozen_forget(c, name)
    free_name(c, <Named*>name)
    names_remove(&c.names, <Named*>name)


cdef void requests_close(Coordinator* c) noexcept nogil:
    """Free all names and requests."""
    names_close(&c.names, free_name, c)


# ---- eviction of ids --------------------------------------------------------------------------------------------------------

# Eviction of ids: all ranks forget names that no rank has submitted for long, and request them anew if need be.
#
# The caller holds rank 0's driver role.

cdef enum:
    SAMPLE = 64                 # number of idle names from which the one that was used longest ago is evicted


cdef NameState* oldest_idle(Coordinator* c) noexcept nogil:
    """Return the name that was used longest ago, among a sample of names that no rank has submitted; NULL: there is none."""
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


cdef void eviction_begin(Coordinator* c, int count) noexcept nogil:
    """Start to free `count` ids, or as many as are idle. Do nothing while earlier ones are on their way."""
    cdef engine_entry* entry
    cdef NameState* name
    if c.evicting_count:
        return
    while c.evicting_count < min(count, <int>EVICTIONS):
        name = oldest_idle(c)
        entry = schedule_reserve(&c.writer, sizeof(engine_entry) // 8) if name != NULL else NULL
        if entry == NULL:
            break
        entry.type, entry.id = ENTRY_EVICT, name.id
        stamp(c, entry)
        schedule_append(&c.writer, entry)
        c.evicting[c.evicting_count], c.evicted_at = name.id, c.writer.tail
        c.evicting_count += 1
        clear_bit(c.defined, name.id)
        c.by_id[name.id] = NULL
        requests_forget(c, name)


cdef void eviction_end(Coordinator* c) noexcept nogil:
    """Free the ids that are on their way, if every rank has forgotten them (I5)."""
    if schedule_slowest(&c.writer) >= c.evicted_at:
        while c.evicting_count:
            c.evicting_count -= 1
            c.free_ids[c.free_count] = c.evicting[c.evicting_count]
            c.free_count += 1


# ---- turns of process sets --------------------------------------------------------------------------------------------------

# Turns on the GPU that process sets request (turns.pyx): noted and given by the world's coordinator.
#
# The caller holds rank 0's driver role.

cdef bint turns_note(Coordinator* c, int number) noexcept nogil:
    """Note that a process set wants one more turn. False without memory."""
    cdef Turns* turns = c.turns
    while turns != NULL and turns.number != number:
        turns = turns.next
    if turns == NULL:
        turns = <Turns*>calloc(1, sizeof(Turns))
        if turns == NULL:
            return False
        turns.number, turns.next, c.turns = number, c.turns, turns
    turns.wanted += 1
    c.turns_wanted += 1
    return True


cdef bint turns_append(Coordinator* c) noexcept nogil:
    """Give all turns that sets want. False: the schedule is full."""
    cdef Turns* turns
    cdef engine_entry* entry
    while c.turns != NULL:
        turns = c.turns
        while turns.wanted:
            entry = schedule_reserve(&c.writer, sizeof(engine_entry) // 8)
            if entry == NULL:
                return False
            entry.type, entry.id = ENTRY_TURN, turns.number
            stamp(c, entry)
            schedule_append(&c.writer, entry)
            turns.wanted -= 1
            c.turns_wanted -= 1
        c.turns = turns.next
        free(turns)
    return True


cdef void turns_close(Coordinator* c) noexcept nogil:
    """Free the turns that were not given."""
    cdef Turns* turns
    while c.turns != NULL:
        turns = c.turns
        c.turns = turns.next
        free(turns)
