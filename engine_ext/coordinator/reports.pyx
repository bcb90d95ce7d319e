"""Reports of who waits for what, and for whom, as the coordinator sees it. The caller holds rank 0's driver role.

A waiting rank knows its own half. When ranks call different collectives each waits for the others. Only the coordinator, which
has all bits and all requests, can report that in one place.

Names that the same ranks have submitted, and the same ranks have not, are one *side*.
"""
from libc.stdint cimport uint32_t
from libc.stdio cimport snprintf
from libc.string cimport memcmp, memset, strncmp

from engine_ext.coordinator.coordinator cimport wanted, withheld
from engine_ext.operations.kinds cimport describe_ranks, fit, kind_name
from engine_ext.platform.atomics cimport load32_relaxed, load_acquire
from engine_ext.platform.clock cimport age_ns, overdue_ns
from engine_ext.shared.layout cimport MAX_RANKS
from engine_ext.shared.segment cimport bit, elsewhere, group_name, prefer_absentee

cdef enum:
    SIDES = 8               # most sides in a report
    SHOWN = 160             # most bytes of a name in a report
    HINT_BYTES = 256        # room that is kept for the hint at the end of a report

cdef const char* STEPS_HINT = (b". Did ranks make different numbers of steps? Give each as many batches, or let each call "
                               b"engine.join() after its last step")
cdef const char* SOME_RANKS_HINT = b". Or do only some ranks call what is waited for, as below 'if rank() == 0'?"

cdef struct Side:
    bint[MAX_RANKS] brought  # by rank: whether it has submitted the names of this side
    bint[MAX_RANKS] missing  # by rank: whether it has not submitted them, and is waited for
    const NameState* name   # the name to show: one that a thread waits for, else the one submitted first
    bint awaited            # whether a thread waits for `name`
    int kind                # number of the kind of `name`, as in names.h
    uint64_t since          # first request of any of the names: nanoseconds of seen time; 2^64 - 1: all travel as bits
    int names               # number of names
    bint gradients          # whether gradients of a DistributedOptimizer are among them

cdef struct Sides:
    Side[SIDES] side
    int count


cdef bint is_gradient(const NameState* name) noexcept nogil:
    """Return whether a name is a gradient's: `gradient.fc.weight`; `gradient2.fc.weight` with the optimizer's number; `change`
    with Adasum."""
    cdef uint32_t k = 8 if name.name_bytes > 8 and strncmp(name.name, "gradient", 8) == 0 else 6
    if name.name_bytes <= k or (k == 6 and strncmp(name.name, "change", 6) != 0):
        return False
    while k < name.name_bytes and 48 <= name.name[k] <= 57:         # digits
        k += 1
    return k < name.name_bytes and name.name[k] == 46               # a dot


cdef void add_to_side(Coordinator* c, Sides* sides, NameState* name) noexcept nogil:
    """Count `name` to its side, unless no rank lacks it."""
    cdef bint[MAX_RANKS] brought
    cdef bint[MAX_RANKS] missing
    cdef int size = c.segment.size, lacking = 0, bringing = 0, r, k
    cdef bint awaited = False
    cdef Side* side
    memset(brought, 0, sizeof(brought))
    memset(missing, 0, sizeof(missing))
    for r in range(size):
        missing[r] = withheld(c, name, r)
        brought[r] = not missing[r] and not c.joined[r] and (name.requests[r] == NULL or name.requests[r].text == NULL)
        lacking += missing[r]
        bringing += brought[r]
        awaited |= brought[r] and name.id >= 0 and bit(c.segment.pages[r].awaited, name.id)
    if lacking == 0 or bringing == 0:
        return
    for k in range(sides.count):
        side = &sides.side[k]
        if memcmp(brought, side.brought, sizeof(brought)) == 0 and memcmp(missing, side.missing, sizeof(missing)) == 0:
            break
    else:
        if sides.count == SIDES:
            return
        side = &sides.side[sides.count]
        sides.count += 1
        memset(side, 0, sizeof(Side))
        side.brought, side.missing, side.since = brought, missing, <uint64_t>-1
    # Without a name that a thread waits for, the first requested is shown: the list of open names is newest first.
    if side.name == NULL or (awaited and not side.awaited) or (not side.awaited and name.listed):
        side.name, side.awaited, side.kind = name, awaited, name.meta.kind
        for r in range(size):
            if name.requests[r] != NULL:
                side.kind = name.requests[r].meta.kind
    if name.listed:
        side.since = min(side.since, name.since)
    side.names += 1
    side.gradients |= is_gradient(name)


cdef void add_requested(Coordinator* c, Sides* sides) noexcept nogil:
    """Count the names with open requests to their sides."""
    cdef NameState* name = c.open
    while name != NULL:
        add_to_side(c, sides, name)
        name = name.next


cdef void add_defined(Coordinator* c, Sides* sides) noexcept nogil:
    """Count the names that travel as bits, where ranks differ, to their sides."""
    cdef uint64_t some, id
    cdef int32_t w
    cdef int r, k
    for w in range(c.words):
        some = 0
        for r in range(c.segment.size):
            if not c.joined[r]:
                some |= load_acquire(&c.segment.pages[r].ready[w]) ^ c.phase[w]
        some &= c.defined[w] & ~c.queued[w]
        for k in range(64 if some else 0):
            id = <uint64_t>w * 64 + k
            if some >> k & 1 and c.by_id[id] != NULL and not c.by_id[id].listed:
                add_to_side(c, sides, c.by_id[id])


cdef bint have_common_rank(const bint* a, const bint* b, int size) noexcept nogil:
    cdef int r
    for r in range(size):
        if a[r] and b[r]:
            return True
    return False


cdef inline bint wait_for_each_other(const Side* a, const Side* b, int size) noexcept nogil:
    """Return whether each of two sides has ranks that the other waits for."""
    return have_common_rank(a.brought, b.missing, size) and have_common_rank(a.missing, b.brought, size)


cdef int describe_names(const Side* side, char* text, int room) noexcept nogil:
    """Write the name to show and the number of others. Return the length."""
    cdef int at = fit(0, snprintf(text, room, "'%.*s'", <int>min(side.name.name_bytes, <uint32_t>SHOWN), side.name.name), room)
    if side.names > 1:
        at = fit(at, snprintf(text + at, room - at, " and %d more", side.names - 1), room)
    return at


cdef int describe_side(Coordinator* c, const Side* side, char* text, int room) noexcept nogil:
    """Write `ranks 0, 2 wait for 'metric', which rank 1 has not submitted`; `have submitted`, unless all of them wait. Return the
    length."""
    cdef int at, r, bringing = 0, lacking = 0
    cdef bint wait = True
    for r in range(c.segment.size):
        bringing += side.brought[r]
        lacking += side.missing[r]
        if side.brought[r] and load32_relaxed(&c.segment.pages[r].blocked) == 0:
            wait = False
    at = describe_ranks(side.brought, c.segment.numbers, c.segment.size, text, room)
    at = fit(at, snprintf(text + at, room - at, " %s ", (b"waits for" if bringing == 1 else b"wait for") if wait else
                          (b"has submitted" if bringing == 1 else b"have submitted")), room)
    at += describe_names(side, text + at, room - at)
    at = fit(at, snprintf(text + at, room - at, ", which "), room)
    at += describe_ranks(side.missing, c.segment.numbers, c.segment.size, text + at, room - at)
    return fit(at, snprintf(text + at, room - at, " %s not submitted", b"has" if lacking == 1 else b"have"), room)


cdef const char* find_hint(const Sides* sides, int size) noexcept nogil:
    """Return a hint at the defect, for ranks that keep each other waiting; NULL: they do not."""
    cdef const char* found = NULL
    cdef int a, b
    for a in range(sides.count):
        for b in range(a):
            if not wait_for_each_other(&sides.side[a], &sides.side[b], size):
                continue
            if sides.side[a].gradients != sides.side[b].gradients:
                return STEPS_HINT
            found = b". They keep each other waiting: do all ranks call the same collectives, in the same order?"
    return found


cdef int describe_set(Coordinator* c, char* text, int room) noexcept nogil:
    """Write `in the process set of ranks 0, 2: `, or `in the group 'tp' of ranks 0, 2: `; nothing for the world. Return the
    length."""
    cdef const char* name = group_name(c.segment)
    cdef int at
    if c.segment.world == c.segment:
        return 0
    if name == NULL:
        at = fit(0, snprintf(text, room, "in the process set of "), room)
    else:
        at = fit(0, snprintf(text, room, "in the group '%s' of ", name), room)
    at += describe_ranks(NULL, c.segment.numbers, c.segment.size, text + at, room - at)
    return fit(at, snprintf(text + at, room - at, ": "), room)


cdef int describe_elsewhere(Coordinator* c, const Sides* sides, char* text, int room) noexcept nogil:
    """Write `; rank 1 waits in another process set`, of ranks that lack a name here and wait where this coordinator does not see.
    Return the length."""
    cdef bint[MAX_RANKS] away
    cdef int at = 0, count = 0, r, k
    memset(away, 0, sizeof(away))
    for r in range(c.segment.size):
        for k in range(sides.count):
            away[r] |= sides.side[k].missing[r] and elsewhere(c.segment, r)
        count += away[r]
    if count:
        at = fit(0, snprintf(text, room, "; "), room)
        at += describe_ranks(away, c.segment.numbers, c.segment.size, text + at, room - at)
        at = fit(at, snprintf(text + at, room - at, " %s in %s", b"waits" if count == 1 else b"wait",
                              b"a process set" if c.segment.world == c.segment else b"the world, or in another set"), room)
    return at


cdef Standoff wait_report_describe(Coordinator* c, int culprit, char* text, int room) noexcept nogil:
    """Describe all names that some ranks have submitted and others have not, those that `culprit` lacks first (-1: in any order).

    Return NONE, and no text, if no rank lacks a name, or `culprit` none.
    """
    cdef Sides sides
    cdef const char* why
    cdef const char* more = b""
    cdef int at = 0, start, others, k
    cdef bint concerns
    sides.count = 0
    add_requested(c, &sides)
    add_defined(c, &sides)
    why = find_hint(&sides, c.segment.size)
    start = at = describe_set(c, text, room - HINT_BYTES)
    for others in range(2):
        for k in range(sides.count):
            concerns = culprit < 0 or sides.side[k].missing[culprit]
            if concerns != (others == 0):
                continue
            if others and at == start:
                break
            if at > start:
                at = fit(at, snprintf(text + at, room - HINT_BYTES - at, "; "), room - HINT_BYTES)
            at += describe_side(c, &sides.side[k], text + at, room - HINT_BYTES - at)
    if at == start:
        text[0] = 0
        return Standoff.NONE
    at += describe_elsewhere(c, &sides, text + at, room - HINT_BYTES - at)
    if why == NULL:
        return Standoff.ONE_SIDED
    if why == STEPS_HINT:
        more = SOME_RANKS_HINT
    snprintf(text + at, room - at, "%s%s", why, more)
    return Standoff.MUTUAL


cdef bint wait_report_overdue(Coordinator* c, uint64_t seen, uint64_t warning_ns, char* text, int room) noexcept nogil:
    """Return whether a name has become overdue: some rank requested it `warning_ns` before `seen`, and others have not. Then
    `text` receives a line for each side of all requested names, as far as there is room, and the names count as reported."""
    cdef Sides sides
    cdef NameState* name = c.open
    cdef bint overdue = False
    cdef int at = 0, k
    while name != NULL:
        overdue |= wanted(name) and not name.reported and overdue_ns(seen, name.since, warning_ns)
        name = name.next
    if not overdue:
        return False
    sides.count = 0
    name = c.open
    while name != NULL:
        if not name.reported and wanted(name):
            add_to_side(c, &sides, name)
            name.reported = True
        name = name.next
    for k in range(sides.count):
        at += describe_names(&sides.side[k], text + at, room - at)
        at = fit(at, snprintf(text + at, room - at, " (%s) %s waited %.0f s for ", kind_name(sides.side[k].kind),
                              b"has" if sides.side[k].names == 1 else b"have",
                              <double>age_ns(seen, sides.side[k].since) / 1e9), room)
        at += describe_ranks(sides.side[k].missing, c.segment.numbers, c.segment.size, text + at, room - at)
        at = fit(at, snprintf(text + at, room - at, "; submitted by "), room)
        at += describe_ranks(sides.side[k].brought, c.segment.numbers, c.segment.size, text + at, room - at)
        at = fit(at, snprintf(text + at, room - at, "\n"), room)
    return at > 0


cdef int wait_report_absentee(Coordinator* c, int rank, int32_t id) noexcept nogil:
    """Return a rank that lacks `id`, which `rank` has submitted, preferably one that does not wait elsewhere; -1: no rank lacks
    it any more."""
    cdef NameState* name = c.by_id[id]
    cdef int culprit = -1, r
    if name == NULL or withheld(c, name, rank):
        return -1
    for r in range(c.segment.size):
        if withheld(c, name, r):
            culprit = prefer_absentee(c.segment, culprit, r)
    return culprit
