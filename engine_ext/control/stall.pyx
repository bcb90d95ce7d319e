"""Who keeps this rank from going on, and when that has lasted too long (ARCHITECTURE.md, "Failure").

An entry that stands still is watched by whoever drives; an operation that is not scheduled, by the thread that waits for it, and
by the monitor thread, which also watches what nobody waits for.
"""
from libc.stdint cimport int32_t, uint64_t
from libc.stdio cimport snprintf
from libc.string cimport strlen

from engine_ext.control.coordinator cimport coordinator_absentee, coordinator_look_at, coordinator_overdue
from engine_ext.control.execute cimport raise_event
from engine_ext.control.layout cimport CAUSE_LEFT, CAUSE_STALLED
from engine_ext.control.segment cimport abort_world, away, elsewhere, ring, ring_others
from engine_ext.control.state cimport EVENT_STALL, OVERDUE_BYTES, State, pthread_mutex_lock, pthread_mutex_unlock
from engine_ext.control.table cimport Op, bit
from engine_ext.data.executor cimport executor_laggard
from engine_ext.platform.atomics cimport load32_acquire, load32_relaxed, load_acquire, now_ns

cdef enum:
    TEXT_BYTES = 1024
    AGAIN_NS = 100000000        # what is overdue, and nobody's fault yet, is looked at this often
    GRACE_NS = 1000000000       # in which rank 0 says who has not requested a new name


cdef void stall_check(State* e) noexcept nogil:
    """End the world when an entry has stood still for the stall limit: the fault of whoever has passed least of it. On the
    coordinator also when a name has been withheld for that long, or by a rank that has left."""
    cdef char[TEXT_BYTES] text
    cdef uint64_t now
    cdef int culprit
    if load32_relaxed(&e.failed) or (e.entry == NULL and (e.segment.rank != 0 or e.coordinator.open == NULL)):
        return
    now = now_ns()
    if e.entry != NULL and e.stall_limit_ns and now - e.executor.progressed >= e.stall_limit_ns:
        culprit = executor_laggard(&e.executor)
        snprintf(text, TEXT_BYTES, "has stood still for %.1f s in the middle of schedule entry %llu",
                 <double>(now - e.executor.progressed) / 1e9, <unsigned long long>e.entry.sequence)
        abort_world(&e.segment, culprit, CAUSE_STALLED, text)
    elif e.segment.rank == 0 and e.coordinator.open != NULL:
        culprit = coordinator_absentee(&e.coordinator, now - e.stall_limit_ns if e.stall_limit_ns else 0, text, TEXT_BYTES)
        if culprit >= 0:
            abort_world(&e.segment, culprit,
                        CAUSE_LEFT if load32_acquire(&e.segment.pages[culprit].left) else CAUSE_STALLED, text)
        elif e.stall_warning_ns:
            report_overdue(e, now - e.stall_warning_ns)


cdef void report_overdue(State* e, uint64_t older_than) noexcept nogil:
    """On the coordinator: have names reported that some rank withholds. Other ranks cannot know who does while a name is new."""
    cdef size_t told
    pthread_mutex_lock(&e.lock)
    told = strlen(e.overdue)            # and not read yet
    if coordinator_overdue(&e.coordinator, older_than, e.overdue + told, OVERDUE_BYTES - <int>told):
        raise_event(e, EVENT_STALL)
    pthread_mutex_unlock(&e.lock)


cdef inline bint withheld(State* e, int rank, int32_t id) noexcept nogil:
    """Whether `rank`, which has not joined, has not brought `id` as often as this rank."""
    return not away(&e.segment, rank) and bit(e.segment.pages[rank].ready, id) != bit(e.segment.mine.ready, id)


cdef Op* longest_waiting(State* e) noexcept nogil:
    """What this rank brought first of all it has in flight; NULL: nothing is. The caller holds the lock."""
    cdef Op* op = e.table.inflight
    while op != NULL and op.next != NULL:
        op = op.next
    return op


cdef bint watched(State* e, Op** op) noexcept nogil:
    """Whether `op`, or for NULL the one that has waited longest, is still in flight. The caller holds the lock."""
    if op[0] == NULL:
        op[0] = longest_waiting(e)
        return op[0] != NULL
    return op[0].record != NULL and op[0].record.inflight == op[0]       # NULL: finished, perhaps not yet marked done


cdef uint64_t stall_deadline(const State* e) noexcept nogil:
    """When whoever drives has to call stall_check again, in nanoseconds; 0: there is nothing to watch."""
    cdef uint64_t when = 0
    if e.segment.rank == 0 and e.coordinator.open != NULL:
        when = coordinator_look_at(&e.coordinator, e.stall_warning_ns, e.stall_limit_ns)
    if e.entry != NULL and e.stall_limit_ns and (when == 0 or e.executor.progressed + e.stall_limit_ns < when):
        when = e.executor.progressed + e.stall_limit_ns
    return max(when, now_ns() + AGAIN_NS) if when else 0


cdef int who_left(State* e, const Op* op) noexcept nogil:
    """A rank that has left without bringing `op`, or without scheduling it; or -1."""
    cdef int32_t id = op.record.id
    cdef int r
    for r in range(e.segment.size):
        if r != e.segment.rank and load32_acquire(&e.segment.pages[r].left) and (r == 0 or (id >= 0 and withheld(e, r, id))):
            return r
    return -1


cdef bint asked(State* e, const Op* op) noexcept nogil:
    """Whether rank 0 has been asked about the overdue `op`, and has had time to answer. It is asked by this call's caller."""
    cdef uint64_t now = now_ns()
    if e.asked_for != op.submitted:
        e.asked_for, e.asked_at = op.submitted, now
    return now - e.asked_at >= GRACE_NS


cdef int who_withholds(State* e, const Op* op) noexcept nogil:
    """Who keeps the overdue `op` from being done, or -1: it is not for this rank to tell."""
    cdef int32_t id = op.record.id
    cdef int culprit = -1, r
    if id >= 0:
        for r in range(e.segment.size):
            if withheld(e, r, id) and (culprit < 0 or (elsewhere(&e.segment, culprit) and not elsewhere(&e.segment, r))):
                culprit = r
        return max(culprit, 0)      # nobody: everybody has brought it and nothing is scheduled
    if load_acquire(&e.segment.coordinator.drained[e.segment.rank]) != e.segment.mine.request_head:
        return 0                    # the coordinator does not read requests
    # Only the coordinator knows who has not requested a new name. If it does not answer, it is the one.
    return 0 if asked(e, op) else -1


cdef void stall_look_after(State* e, Op* op, uint64_t older_than) noexcept nogil:
    """Called between two ticks of a wait for `op`; NULL: for whichever has waited longest. Ends the world when a rank that it
    needs has left, or when `op` was brought before `older_than` (0: never) and some rank withholds it."""
    cdef char[TEXT_BYTES] text
    cdef int culprit = -1, cause = CAUSE_LEFT
    pthread_mutex_lock(&e.lock)
    # With entries to execute nobody is to blame yet: stall_check watches over those.
    if watched(e, &op) and load_acquire(&e.segment.mine.cursor) == load_acquire(&e.segment.coordinator.tail):
        culprit = who_left(e, op)
        if culprit < 0 and op.submitted < older_than:
            # Whoever withholds `op` may itself be waiting for what a third rank withholds: that was brought here earlier.
            op = longest_waiting(e)
            culprit, cause = who_withholds(e, op), CAUSE_STALLED
        if culprit >= 0:
            snprintf(text, TEXT_BYTES, "'%.*s' was not %s by it", <int>op.record.name_bytes, op.record.name,
                     b"scheduled" if culprit == 0 and not (op.record.id >= 0 and withheld(e, 0, op.record.id)) else b"brought")
    pthread_mutex_unlock(&e.lock)
    if culprit >= 0:
        abort_world(&e.segment, culprit, cause, text)
    else:
        # Rank 0 may know who withholds a name, and looks when it is woken. As for the others: a wake-up that was lost after all
        # would cost them a tick, not the stall limit.
        ring_others(&e.segment, 0)


cdef uint64_t stall_watch(State* e, uint64_t now) noexcept nogil:
    """Look after all that this rank has in flight, whether a thread waits for it or not: report what is overdue, once, and end the
    world when the stall limit is over. When to look again; the end of time after a failure."""
    cdef uint64_t oldest = 0, unreported = 0, again = <uint64_t>-1
    cdef bint news
    cdef Op* op
    if load32_relaxed(&e.failed):
        return again
    pthread_mutex_lock(&e.lock)
    op = e.table.inflight                       # newest first
    while op != NULL:
        oldest = op.submitted
        if oldest > e.reported:
            unreported = oldest
        op = op.next
    news = e.stall_warning_ns != 0 and unreported != 0 and unreported + e.stall_warning_ns <= now
    if news:
        e.reported, unreported = now, 0         # a report tells all that is in flight
    pthread_mutex_unlock(&e.lock)
    if news:
        raise_event(e, EVENT_STALL)
        ring(&e.segment, 0, 0)                  # it may know more
    if e.stall_limit_ns and oldest and oldest + e.stall_limit_ns <= now:
        stall_look_after(e, NULL, now - e.stall_limit_ns)
    # What is brought from now on cannot be overdue sooner than this.
    if e.stall_warning_ns:
        again = (unreported if unreported else now) + e.stall_warning_ns
    if e.stall_limit_ns:
        again = min(again, (oldest if oldest else now) + e.stall_limit_ns)
    return max(again, now + AGAIN_NS)
