"""Lateness: which entries a timeline records, which rank submitted each of their tensors last, and the counters of arrivals.

A rank sends its time of submission in its request, or writes it beside its bit while `recording` is set; the clock is the
coordinator's. Entries are recorded as long as rank 0's budget of lines lasts, the same ones on every rank. The caller holds rank
0's driver role.
"""
from engine_ext.coordinator.coordinator cimport time_of_step
from engine_ext.platform.atomics cimport load32_acquire, load_relaxed
from engine_ext.platform.clock cimport age_ns
from engine_ext.platform.token_bucket cimport bucket_has
from engine_ext.shared.layout cimport ARRIVAL_LAST_BITS, ARRIVAL_WAIT_BITS, rank_page


cdef void lateness_decide(Coordinator* c, uint64_t now) noexcept nogil:
    """Decide whether tensors that become ready from now on are recorded."""
    c.recording = load32_acquire(&c.timeline.on) != 0
    if c.recording:
        c.recorded.filled = max(c.recorded.filled, c.timeline.saved_since)
        c.recording = bucket_has(&c.recorded, load_relaxed(&c.timeline.rate), now)


cdef void lateness_note(Coordinator* c, NameState* name) noexcept nogil:
    """Note which rank submitted `name` last, and how late. All ranks have submitted it; its requests are still open."""
    cdef uint64_t earliest = <uint64_t>-1, latest = 0, late, when
    cdef rank_page* page
    cdef int r, last = -1
    name.ready = time_of_step(c)
    for r in range(c.segment.size):
        if c.joined[r]:
            continue
        if name.requests[r] != NULL:
            when = name.requests[r].submitted
        else:
            page = c.segment.pages[r]
            when = load_relaxed(&page.brought[name.id])
            if when < c.timeline.since or when <= name.closed:     # of an earlier round: this time the rank did not write it
                continue
        if when == 0:
            continue
        earliest = min(earliest, when)
        if when > latest:
            latest, last = when, r
    late = min((latest - earliest) // 1000, <uint64_t>0xFFFFFFFF) if last >= 0 else 0
    name.arrival = <uint64_t>(last + 1) | late << (ARRIVAL_LAST_BITS + ARRIVAL_WAIT_BITS)


cdef void lateness_append(Coordinator* c, engine_entry* entry, const int32_t* ids) noexcept nogil:
    """Complete a recorded entry: its last words say which rank submitted each of its members last."""
    cdef uint64_t* arrivals = <uint64_t*>entry + entry.words - entry.items
    cdef uint64_t wait
    cdef NameState* name
    cdef uint32_t i
    entry.closed = time_of_step(c)
    for i in range(entry.items):
        name = c.by_id[ids[i]]
        name.closed = entry.closed
        if name.ready:
            wait = min(age_ns(entry.closed, name.ready) // 1000, <uint64_t>((1 << ARRIVAL_WAIT_BITS) - 1))
            arrivals[i] = name.arrival | wait << ARRIVAL_LAST_BITS
        name.ready = 0
    c.recorded.level -= TRACE_LINES_ENTRY + TRACE_LINES_TENSOR * <double>entry.items
    lateness_decide(c, entry.closed)


cdef uint64_t lateness_find(const Coordinator* c, const NameState* name, uint64_t* latest) noexcept nogil:
    """Return when the first rank submitted `name`, by its open requests or by the words beside its bit. 0: no rank did, or one
    does not know the time by this clock. `latest` receives the rank that submitted it last, and how much later: a length of
    time, which any clock measures alike. It is 0 if a rank has not written its word in this round."""
    cdef uint64_t earliest = <uint64_t>-1, last = 0, when
    cdef bint known = True
    cdef int r, rank = -1
    for r in range(c.segment.size):
        if c.joined[r]:
            continue
        if name.requests[r] != NULL:
            when = name.requests[r].submitted
        elif name.id >= 0:
            when = load_relaxed(&c.segment.pages[r].brought[name.id])
            known &= when > max(name.counted, c.counting)       # else it is of an earlier round, or of an earlier counting
        else:
            continue
        earliest = min(earliest, when)
        if when > last:
            last, rank = when, r
    latest[0] = 0
    if known and rank >= 0 and earliest != 0:
        latest[0] = <uint64_t>(rank + 1) | min((last - earliest) // 1000, <uint64_t>0xFFFFFFFF) << (
            ARRIVAL_LAST_BITS + ARRIVAL_WAIT_BITS)
    return earliest if earliest != <uint64_t>-1 else 0


cdef void lateness_count(Coordinator* c, engine_entry* entry, NameState* last) noexcept nogil:
    """Write on an entry when the first rank submitted the last of its members, which rank was last, and how much later. Each
    rank counts by how much it was later than the first, and what it waited for."""
    cdef uint64_t latest = last.latest
    entry.earliest = last.earliest if last.earliest else lateness_find(c, last, &latest)
    entry.arrival = latest if entry.earliest else 0
    last.counted = time_of_step(c)
    if entry.earliest:
        tally(c.counters_page.negotiation_ns, age_ns(last.counted, entry.earliest))
        tally(c.counters_page.negotiated, 1)
