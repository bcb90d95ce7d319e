"""Stalls: ranks that keep this one from going on, and when that has lasted too long (docs/architecture/protocol-failure.md).

The driver watches an entry in progress. The thread that waits for an operation watches it while it is not scheduled; so does the
monitor thread, which also watches operations for which nobody waits.

`seen` is the time that this process has seen pass (platform/clock.h): a job that was suspended as a whole is not late. "Never" is
0 for limits and for stall_deadline, and 2^64 - 1 for stall_watch.
"""
from libc.stdint cimport int32_t, uint32_t
from libc.stdio cimport snprintf
from libc.string cimport strcmp, strcpy, strlen

from engine_ext.control.completion cimport complete_op, raise_event
from engine_ext.control.native_calls cimport backlog_take_overdue
from engine_ext.control.observers cimport observe_warning
from engine_ext.control.state cimport EVENT_STALL, OVERDUE_BYTES
from engine_ext.control.turns cimport turns_look_for_left
from engine_ext.coordinator.coordinator cimport Coordinator, coordinator_absentee, coordinator_look_at
from engine_ext.coordinator.reports cimport Standoff, wait_report_absentee, wait_report_describe, wait_report_overdue
from engine_ext.data.executor cimport executor_laggard, executor_passed_by
from engine_ext.gpu.device cimport device
from engine_ext.hosts.connections cimport ALL_ANSWER, find_silent_rank, liveness_is_checked
from engine_ext.operations.kinds cimport describe_ranks, fit
from engine_ext.operations.op cimport OP_ASIDE, OP_TAKEN, Record, fails
from engine_ext.platform.atomics cimport (
    cas32, load32_acquire, load32_relaxed, load_acquire, load_pointer, load_relaxed, now_ns, store32_release,
)
from engine_ext.platform.clock cimport after_ns, age_ns, overdue_ns, patience_look, patience_open
from engine_ext.platform.doors cimport DOOR_EVERYBODY, door_ring
from engine_ext.platform.posix cimport pthread_mutex_lock, pthread_mutex_unlock
from engine_ext.shared.layout cimport CAUSE_LEFT, CAUSE_STALLED, COORDINATOR, MAX_RANKS, REASON_BYTES
from engine_ext.shared.segment cimport (
    Segment, abort_world, away, bit, claimed, coordinates, gone, prefer_absentee, ring_both, settle_claim, visible, wake,
    wake_others,
)

cdef enum:
    TEXT_BYTES = REASON_BYTES
    SHOWN = 63                      # most bytes of a name in the middle of a text
    AGAIN_NS = 100000000            # period of looks at an operation that is overdue while no rank is known to be at fault
    ANSWER_NS = 300000000           # time for rank 0 to report who waits for whom, before a rank blames by its own knowledge
    GRACE_NS = 1000000000           # time for rank 0 to name the ranks that lack a new name, which it alone knows
    JOIN_GRACE_NS = 2000000000      # added to two stall limits: the longest that another rank's own wait can last
    SHORTEST_STEP_NS = 250000000    # least step in which a process sees time pass: longer than a tick
    LONGEST_STEP_NS = 15000000000   # greatest such step


cdef void stall_open(State* e) noexcept nogil:
    """Begin to see time pass, in steps that are short compared with the limits on progress."""
    cdef uint64_t least = e.stall_limit_ns
    if least == 0 or 0 < e.stall_warning_ns < least:
        least = e.stall_warning_ns
    patience_open(&e.own_clock, min(max(least // 4, <uint64_t>SHORTEST_STEP_NS), <uint64_t>LONGEST_STEP_NS))
    e.look_ns = min(max(least // 8, <uint64_t>SHORTEST_STEP_NS // 2), <uint64_t>LONGEST_STEP_NS // 2) if least else 0


cdef bint stall_accuse(State* e, int culprit, const char* text, bint judges) noexcept nogil:
    """End the world for a rank that stands still. Return whether that is done; if not, call again.

    On several hosts it takes some seconds and several calls, in which all ranks are asked whether they run. A rank that does not
    answer is to blame, whatever others seem to do. `judges`: the caller sees the names of all ranks, and goes before callers that
    know only their own.
    """
    cdef Segment* world = &e.world.segment
    cdef int silent = ALL_ANSWER
    if e.world.network != NULL:
        silent = find_silent_rank(&e.world.liveness, world, e.world.network, patience_look(e.clock), judges)
    if silent == ALL_ANSWER:
        abort_world(&e.segment, culprit, CAUSE_STALLED, text)
    elif silent >= 0:
        abort_world(world, silent, CAUSE_STALLED, b"its process answers nothing, as one that is stopped")
        if silent == world.leader:
            settle_claim(world)             # that leader would have sent the claim to the coordinator's host
    return silent == ALL_ANSWER or silent >= 0


cdef void raise_warning(State* e) noexcept nogil:
    """Count a stall report, and have Python log it."""
    observe_warning(e)
    raise_event(e, EVENT_STALL)


cdef void add_stall_line(State* e, const char* line) noexcept nogil:
    """Add a line to the next stall report, and wake the monitor thread to log it."""
    cdef size_t used
    pthread_mutex_lock(&e.lock)
    used = strlen(e.overdue)            # lines that were not read yet
    snprintf(e.overdue + used, OVERDUE_BYTES - used, "%s\n", line)
    pthread_mutex_unlock(&e.lock)
    raise_warning(e)


cdef void stall_check(State* e) noexcept nogil:
    """Look for stalls before the role's holder sleeps.

    End the world when a rank has left in the middle of an entry, or without an operation in flight here; or when the entry has
    stood still for the stall limit, which is the fault of the rank that has passed least of it. On the coordinator also when some
    rank has not submitted a name for that long, or has left without it.
    """
    if load32_relaxed(&e.failed) or claimed(&e.segment):
        return
    if e.entry != NULL:
        check_entry(e)
    if coordinates(&e.segment):
        check_names(e)
    stall_look_for_left(e)


cdef void end_for_left(State* e, int culprit, const char* text) noexcept nogil:
    """End the world for a rank that has left while it was needed. A process set that ends alone is marked; its driver then fails
    it."""
    if not e.ends_alone:
        abort_world(&e.segment, culprit, CAUSE_LEFT, text)
    elif cas32(&e.parted, 0, <uint32_t>(culprit + 1)):          # pairs with drive_once
        ring_both(&e.segment, e.segment.rank)
        door_ring(&e.local_door, DOOR_EVERYBODY)


cdef int who_left_it(State* e) noexcept nogil:
    """Return a rank that has left and has not passed the entry in progress, or -1. A rank that has left writes no more words."""
    cdef int r
    for r in range(e.segment.size):
        # `left` is read before its progress: pairs with the release in close, which comes after the last chunk.
        if r != e.segment.rank and load32_acquire(&e.segment.pages[r].left) and not executor_passed_by(&e.executor, r):
            return r
    return -1


cdef void check_entry(State* e) noexcept nogil:
    """End the world, or warn, if the entry in progress has stood still for too long or needs a rank that has left."""
    cdef char[TEXT_BYTES] text
    cdef int culprit = who_left_it(e)
    cdef uint64_t stood
    cdef const Record* first = e.batch[0].record        # valid: in flight until the entry is done
    cdef int shown = <int>min(first.name_bytes, <uint32_t>SHOWN)
    if culprit >= 0:
        snprintf(text, TEXT_BYTES, "'%.*s' was under way (schedule entry %llu), and it did not take part to its end",
                 shown, first.name, <unsigned long long>e.entry.sequence)
        end_for_left(e, culprit, text)
        return
    culprit = executor_laggard(&e.executor, False)
    if culprit < 0:         # a world of one rank waits for itself alone
        culprit = e.segment.rank
    stood = age_ns(patience_look(e.clock), e.executor.progressed)
    if e.stall_limit_ns and stood >= e.stall_limit_ns:
        snprintf(text, TEXT_BYTES, "has stood still for %.1f s in the middle of schedule entry %llu", <double>stood / 1e9,
                 <unsigned long long>e.entry.sequence)
        stall_accuse(e, culprit, text, False)
    elif e.stall_warning_ns and stood >= e.stall_warning_ns and e.stall_reported != e.entry.sequence + 1:
        e.stall_reported = e.entry.sequence + 1
        snprintf(text, TEXT_BYTES, "schedule entry %llu ('%.*s') has stood still for %.0f s for rank %d",
                 <unsigned long long>e.entry.sequence, shown, first.name, <double>stood / 1e9, e.segment.numbers[culprit])
        add_stall_line(e, text)


cdef bint all_are_aside(State* e) noexcept nogil:
    """Return whether all operations in flight on this rank, at least one, may remain undone: receives of a set of two ranks."""
    cdef bint aside
    cdef Op* op
    pthread_mutex_lock(&e.lock)
    op = e.table.inflight
    aside = op != NULL
    while op != NULL:
        aside = aside and load32_relaxed(&op.flags) & OP_ASIDE != 0
        op = op.next
    pthread_mutex_unlock(&e.lock)
    return aside


cdef void check_names(State* e) noexcept nogil:
    """Look for names that some rank has not submitted. Called on the coordinator, which sees new names itself; ranks tell it of
    overdue others."""
    cdef Coordinator* c = &e.coordinator
    cdef char[TEXT_BYTES] text
    cdef char[TEXT_BYTES] all
    cdef uint32_t word
    cdef uint64_t seen
    cdef bint news = False
    cdef int culprit = -1, r
    for r in range(e.segment.size):
        news |= load32_relaxed(&e.segment.pages[r].overdue) >> 1 != e.overdue_seen[r]
        news |= load32_relaxed(&e.segment.pages[r].overdue) & 1
    if not news and c.open == NULL:
        return
    seen = patience_look(e.clock)
    if c.open != NULL:
        culprit = coordinator_absentee(c, seen, e.stall_limit_ns, text, TEXT_BYTES)
        if culprit >= 0 and load32_acquire(&e.segment.pages[culprit].left):
            if not all_are_aside(e):
                end_for_left(e, culprit, text)
            return
    for r in range(e.segment.size):
        word = load32_acquire(&e.segment.pages[r].overdue)      # pairs with say_overdue: the rank's bit is seen too
        if culprit < 0 and word & 1:
            text[0], culprit = 0, wait_report_absentee(c, r, <int32_t>(word >> 1) - 1)
    if culprit >= 0:
        if wait_report_describe(c, culprit, all, TEXT_BYTES) != Standoff.NONE:
            stall_accuse(e, culprit, all, True)
        elif text[0]:
            stall_accuse(e, culprit, text, True)
    elif e.stall_warning_ns:
        report_names(e, seen)


cdef void report_names(State* e, uint64_t seen) noexcept nogil:
    """Report names that some rank has not submitted. While a name is new, no other rank knows who lacks it, or why."""
    cdef char[OVERDUE_BYTES] text
    cdef uint32_t word
    cdef bint news = False, mine = False
    cdef int r
    if wait_report_overdue(&e.coordinator, seen, e.stall_warning_ns, text, OVERDUE_BYTES - TEXT_BYTES):
        text[strlen(text) - 1] = 0          # cuts the newline of the last line
        news = True
        add_stall_line(e, text)
    for r in range(e.segment.size):
        word = load32_acquire(&e.segment.pages[r].overdue) >> 1
        if word != e.overdue_seen[r]:
            news |= word != 0
            mine |= word != 0 and r == e.segment.rank
        e.overdue_seen[r] = word
    if news and wait_report_describe(&e.coordinator, -1, text, TEXT_BYTES) == Standoff.MUTUAL and strcmp(text, e.account) != 0:
        strcpy(e.account, text)
        add_stall_line(e, text)
    elif mine:
        raise_warning(e)


cdef inline bint has_not_submitted_id(State* e, int rank, int32_t id) noexcept nogil:
    """Return whether `rank`, which has not joined, has submitted `id` less often than this rank."""
    return (visible(&e.segment, rank) and not away(&e.segment, rank)
            and bit(e.segment.pages[rank].ready, id) != bit(e.segment.mine.ready, id))


cdef Op* longest_waiting(State* e) noexcept nogil:
    """Return the operation that this rank submitted first, without those that the CUDA thread has taken (all ranks have
    submitted them); or NULL. The caller holds the lock."""
    cdef Op* op = e.table.inflight
    cdef Op* oldest = NULL
    while op != NULL:
        if not load32_relaxed(&op.flags) & OP_TAKEN:
            oldest = op
        op = op.next
    return oldest


cdef bint is_in_flight(State* e, Op** op) noexcept nogil:
    """Return whether `op` is still in flight. NULL is replaced by the operation that has waited longest. The caller holds the
    lock."""
    if op[0] == NULL:
        op[0] = longest_waiting(e)
        return op[0] != NULL
    # NULL: finished, perhaps not marked done yet
    return op[0].record != NULL and op[0].record.inflight == op[0] and not load32_relaxed(&op[0].flags) & OP_TAKEN


cdef uint64_t stall_deadline(State* e) noexcept nogil:
    """Return when the driver has to call stall_check again: nanoseconds, monotonic; 0: nothing has to be watched."""
    cdef uint64_t when = 0, still = e.stall_limit_ns
    if coordinates(&e.segment) and e.coordinator.open != NULL:
        when = coordinator_look_at(&e.coordinator, e.stall_warning_ns, e.stall_limit_ns)
    if e.entry != NULL:
        if e.stall_warning_ns and e.stall_reported != e.entry.sequence + 1 and (still == 0 or e.stall_warning_ns < still):
            still = e.stall_warning_ns
        if still and (when == 0 or after_ns(e.executor.progressed, still) < when):
            when = after_ns(e.executor.progressed, still)
    if liveness_is_checked(&e.world.liveness, patience_look(e.clock)):
        return after_ns(now_ns(), AGAIN_NS)
    return after_ns(now_ns(), max(age_ns(when, patience_look(e.clock)), AGAIN_NS)) if when else 0


cdef int who_left(State* e, const Op* op) noexcept nogil:
    """Return a rank that has left without submitting `op`, or without scheduling it; or -1. A failed call under a new name needs
    every rank, and is over before a rank that knows of it leaves."""
    cdef int32_t id = op.record.id
    cdef int r
    for r in range(e.segment.size):
        if r != e.segment.rank and gone(&e.segment, r) and (
                r == COORDINATOR or (has_not_submitted_id(e, r, id) if id >= 0 else fails(op))):
            return r
    return -1


cdef int left_without(State* e, const Op* op, char* text) noexcept nogil:
    """Return a rank that has left and that `op` needs, with the reason in `text`; or -1. The caller holds the lock."""
    cdef int culprit = -1 if load32_relaxed(&op.flags) & OP_ASIDE else who_left(e, op)
    # While entries remain to be executed no rank is to blame: stall_check watches those. A rank that has left appends no more.
    if culprit < 0 or load_acquire(&e.segment.mine.cursor) != load_acquire(&e.segment.coordinator.tail):
        return -1
    describe_lack(e, op, culprit, text)
    return culprit


cdef void describe_lack(State* e, const Op* op, int culprit, char* text) noexcept nogil:
    """Write what `culprit` has not done for `op`: scheduled or submitted it."""
    snprintf(text, TEXT_BYTES, "'%.*s' was not %s by it", <int>op.record.name_bytes, op.record.name,
             b"scheduled" if culprit == COORDINATOR and (op.record.id < 0 or not has_not_submitted_id(e, culprit, op.record.id))
             else b"submitted")


cdef void stall_look_for_left(State* e) noexcept nogil:
    """End the world when a rank has left that an operation in flight needs, whether a thread waits for it or not. Called before
    the driver sleeps, and after a native call was submitted: a rank that leaves wakes all others."""
    cdef char[TEXT_BYTES] text
    cdef int culprit = -1
    cdef Op* op
    if load32_acquire(&e.segment.header.departures) == 0:       # pairs with close: the ranks that count there have set `left`
        return
    pthread_mutex_lock(&e.lock)
    op = e.table.inflight
    while op != NULL and culprit < 0:
        if not load32_relaxed(&op.flags) & OP_TAKEN:                        # all ranks have submitted that
            culprit = left_without(e, op, text)
        op = op.next
    op = e.backlog
    while op != NULL and culprit < 0:
        if op.record.inflight != NULL and fails(op.record.inflight):        # behind a failed call, which is looked at instead
            culprit = left_without(e, op.record.inflight, text)
        op = op.next
    pthread_mutex_unlock(&e.lock)
    if culprit >= 0:
        end_for_left(e, culprit, text)
    turns_look_for_left(e)


cdef void say_overdue(State* e, const Op* op, bint limit) noexcept nogil:
    """Tell the coordinator of an overdue operation with an id; it knows new names itself. `limit`: the stall limit has passed, so
    the coordinator accuses the rank that withholds the operation; otherwise the stall warning is due, and it only reports. The
    caller holds the lock, and wakes the leader afterwards."""
    if op.record.id >= 0:
        store32_release(&e.segment.mine.overdue, <uint32_t>(op.record.id + 1) << 1 | limit)


cdef bint has_asked_coordinator(State* e, const Op* op, uint64_t seen) noexcept nogil:
    """Return whether rank 0 was asked about the overdue `op` and has had time to answer; ask it the first time. The caller holds
    the lock."""
    if e.asked_for != op.submitted:
        e.asked_for, e.asked_at = op.submitted, seen
        say_overdue(e, op, True)
    return overdue_ns(seen, e.asked_at, ANSWER_NS if op.record.id >= 0 else GRACE_NS)


cdef int who_withholds(State* e, const Op* op, uint64_t seen) noexcept nogil:
    """Return the rank to blame for the overdue `op`; -1: rank 0 has not had time to answer yet."""
    cdef int32_t id = op.record.id
    cdef int culprit = -1, r
    if not has_asked_coordinator(e, op, seen):
        return -1
    if id >= 0:
        for r in range(e.segment.size):
            if has_not_submitted_id(e, r, id):
                culprit = prefer_absentee(&e.segment, culprit, r)
        return culprit if culprit >= 0 else COORDINATOR     # every rank has submitted it, and it is not scheduled
    return COORDINATOR              # a new name: only the coordinator knows who lacks it, and it does not answer


cdef void stall_look_after(State* e, Op* op) noexcept nogil:
    """Look after a wait for `op` (NULL: the operation that has waited longest), between two ticks. End the world when a rank that
    it needs has left, or when some rank has not submitted it for longer than the stall limit."""
    cdef char[TEXT_BYTES] text
    cdef uint64_t seen = patience_look(e.clock)
    cdef int culprit = -1
    cdef bint stalled = False, reported = False
    pthread_mutex_lock(&e.lock)
    if is_in_flight(e, &op):
        culprit = left_without(e, op, text)
        if (culprit < 0 and overdue_ns(seen, op.since, e.stall_limit_ns)
                and load_acquire(&e.segment.mine.cursor) == load_acquire(&e.segment.coordinator.tail)):
            # The rank that lacks `op` may wait itself for one that a third rank lacks: that one was submitted here earlier.
            op = longest_waiting(e)
            culprit, stalled = who_withholds(e, op, seen), True
            if culprit >= 0:
                describe_lack(e, op, culprit, text)
    pthread_mutex_unlock(&e.lock)
    if culprit >= 0 and stalled:
        reported = stall_accuse(e, culprit, text, False)
    elif culprit >= 0:
        reported = True
        end_for_left(e, culprit, text)
    if not reported:
        # Rank 0 knows which ranks lack a name, and looks when it is woken. The others are woken, too: a lost wake-up then costs
        # them a tick, not the stall limit.
        wake_others(&e.segment, 0)
        if e.segment.rank == e.segment.leader and load32_relaxed(&e.segment.mine.overdue):
            wake(&e.segment, e.segment.leader, 0)              # the driver of this rank


cdef void give_up_waiting(State* e, uint64_t seen) noexcept nogil:
    """End native calls that have waited longer than the stall limit for a failed call under their name to be settled."""
    cdef Op* op
    while True:
        pthread_mutex_lock(&e.lock)
        op = backlog_take_overdue(e, seen)
        pthread_mutex_unlock(&e.lock)
        if op == NULL:
            return
        complete_op(e, op)


cdef bint waits_in_a_call(const State* e) noexcept nogil:
    """Return whether the CUDA thread waits in a call, and not for the device or for a turn: monitor.pyx reports those."""
    cdef const device* d = e.world.device
    if e.queue != NULL and load_relaxed(&e.queue.handed) > load_relaxed(&e.queue.given):
        return False                        # it may wait for its turn
    return load_acquire(&d.passed) >= load_acquire(&d.enqueued)         # pairs with cuda_thread_look


cdef void accuse_cuda_thread(State* e) noexcept nogil:
    """End the world for this rank, whose CUDA thread has not finished an item within the stall limit."""
    cdef char[TEXT_BYTES] text
    cdef const char* call = <const char*>load_pointer(&e.world.device.call)
    snprintf(text, TEXT_BYTES, "%s has not returned for %g s: the driver or the GPU hangs, or NCCL waits for another rank",
             call if call != NULL else <const char*>b"the GPU's thread", <double>e.stall_limit_ns / 1e9)
    stall_accuse(e, e.segment.rank, text, False)


cdef uint64_t stall_watch(State* e, uint64_t seen) noexcept nogil:
    """Look after all operations in flight on this rank, whether a thread waits for them or not. Report overdue ones once, and end
    the world when the stall limit is over. Return when to look again, as this process sees time pass; 2^64 - 1: never."""
    cdef uint64_t oldest = 0, taken = 0, unreported = 0, again = <uint64_t>-1
    cdef uint32_t overdue = 0
    cdef bint news
    cdef Op* first = NULL
    cdef Op* op
    if load32_relaxed(&e.failed):
        e.overdue_count = 0
        return again
    give_up_waiting(e, seen)
    pthread_mutex_lock(&e.lock)
    op = e.table.inflight                       # the list is newest first, so the last one seen is the oldest
    while op != NULL:
        if load32_relaxed(&op.flags) & OP_TAKEN:
            taken = op.taken if taken == 0 else min(taken, op.taken)
            op = op.next
            continue
        oldest = op.since
        overdue += overdue_ns(seen, oldest, e.stall_warning_ns)
        if oldest > e.reported:
            unreported, first = oldest, op
        op = op.next
    news = unreported != 0 and overdue_ns(seen, unreported, e.stall_warning_ns)
    if news:
        e.reported, unreported = seen, 0        # one report covers all that is in flight
        if e.segment.mine.overdue & 1 == 0:
            say_overdue(e, first, False)
    pthread_mutex_unlock(&e.lock)
    e.overdue_count = overdue
    if news:
        if not coordinates(&e.segment):
            raise_warning(e)
        # Rank 0 may know more, and reports what it has in flight after it has looked.
        wake(&e.segment, e.segment.leader, 0)
    if oldest and overdue_ns(seen, oldest, e.stall_limit_ns):
        stall_look_after(e, NULL)
    if taken and overdue_ns(seen, taken, e.stall_limit_ns) and waits_in_a_call(e):
        accuse_cuda_thread(e)
    # An operation submitted from now on is not overdue before this.
    if e.stall_warning_ns:
        again = after_ns(unreported if unreported else seen, e.stall_warning_ns)
    if e.stall_limit_ns:
        again = min(again, after_ns(oldest if oldest else seen, e.stall_limit_ns))
        if taken:
            again = min(again, after_ns(taken, e.stall_limit_ns))
    return max(again, after_ns(seen, AGAIN_NS))


cdef void stall_join(State* e, uint64_t begun) noexcept nogil:
    """Look after a wait for other ranks to join, which began at `begun` and has lasted a tick. It may last as long as the others
    go on, but not when nothing happens any more or one of them has left."""
    cdef char[TEXT_BYTES] text
    cdef uint64_t quiet = age_ns(patience_look(e.clock), max(begun, load_relaxed(&e.executor.progressed)))
    cdef int missing = -1, at_fault = -1, r
    for r in range(e.segment.size):
        if away(&e.segment, r):
            continue
        if load32_acquire(&e.segment.pages[r].left):
            abort_world(&e.segment, r, CAUSE_LEFT, b"it did not join")
            return
        if missing < 0:
            missing = r
        # A rank that waits itself cannot join, and reports who keeps it when its own limit is over. Otherwise it is at fault.
        if at_fault < 0 and load32_relaxed(&e.segment.pages[r].blocked) == 0:
            at_fault = r
    if at_fault < 0 and quiet >= after_ns(after_ns(e.stall_limit_ns, e.stall_limit_ns), JOIN_GRACE_NS):
        at_fault = missing
    if at_fault >= 0 and e.stall_limit_ns and quiet >= e.stall_limit_ns:
        snprintf(text, TEXT_BYTES, "has not joined, and submitted nothing, for %.1f s", <double>quiet / 1e9)
        stall_accuse(e, at_fault, text, False)
    elif missing >= 0 and e.stall_warning_ns and quiet >= e.stall_warning_ns and not e.joins_reported:
        e.joins_reported = True
        report_join(e, quiet)
    wake_others(&e.segment, 0)


cdef void report_join(State* e, uint64_t quiet) noexcept nogil:
    """Report that join waits, and for which ranks."""
    cdef char[OVERDUE_BYTES] text
    cdef bint[MAX_RANKS] late
    cdef int count = 0, at, r
    for r in range(e.segment.size):
        late[r] = not away(&e.segment, r)
        count += late[r]
    if count == 0:
        return              # the last one has joined meanwhile
    at = fit(0, snprintf(text, OVERDUE_BYTES, "join has waited %.0f s for ", <double>quiet / 1e9), OVERDUE_BYTES)
    at += describe_ranks(late, e.segment.numbers, e.segment.size, text + at, OVERDUE_BYTES - at)
    snprintf(text + at, OVERDUE_BYTES - at, ", and nothing was submitted")
    add_stall_line(e, text)
