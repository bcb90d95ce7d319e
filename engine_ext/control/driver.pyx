"""The driver's role, and the one wait (docs/architecture/protocol-waiting.md).

The role is one word of each engine. While nobody waits, the engine thread (engines.pyx) holds it, asleep; a thread in a blocking
call takes the role over without waking it. The state that a pass touches (coordinator, executor, the entry in progress) belongs
to the role's holder and needs no lock.
"""
from libc.stdint cimport int32_t
from libc.string cimport memcpy, memset, strlen

from engine_ext.control.completion cimport wake_waiters
from engine_ext.control.execute cimport fail_everything, run_schedule
from engine_ext.control.failure cimport claim_await, claim_deadline
from engine_ext.control.native_calls cimport backlog_add, backlog_submit
from engine_ext.control.observers cimport (
    observe_call_begins, observe_call_nears, observe_late_wake, observe_readiness, observe_sleep, observe_submission,
    observe_wait_begins, observe_wait_ends, observe_yield,
)
from engine_ext.control.stall cimport stall_check, stall_deadline
from engine_ext.control.state cimport Role
from engine_ext.control.table cimport table_await, table_brought_by_all, table_record, table_release, table_submit
from engine_ext.control.turns cimport turns_retry
from engine_ext.coordinator.coordinator cimport (
    coordinator_deadline, coordinator_step, coordinator_set_knobs, coordinator_unseen, waiting,
)
from engine_ext.data.executor cimport executor_needs
from engine_ext.hosts.network cimport (
    network_delayed_until, network_read, network_relay, network_rest, network_send_failure_cause, network_stop_reading,
    network_unseen,
)
from engine_ext.operations.kinds cimport kind_name
from engine_ext.operations.op cimport OP_DONE, OP_IN_TURN, OP_PATIENT, fails
from engine_ext.platform.atomics cimport (
    FENCE_CALLER, FENCE_ENGINE, FENCE_GIVE_BACK, FENCE_ROLE, FENCE_SUBMIT, FENCE_TAKE, FENCE_WAITER, add32, cas, cas32, count_up,
    full_fence, load32_acquire, load32_relaxed, load_acquire, load_pointer, load_relaxed, now_ns,
    spin_pause, store32_relaxed, store32_release, store_relaxed, store_release, yield_processor,
)
from engine_ext.platform.clock cimport age_ns
from engine_ext.platform.doors cimport DOOR_EVERYBODY, door_count, door_ring, door_sleep
from engine_ext.platform.posix cimport pthread_mutex_lock, pthread_mutex_unlock, pthread_self
from engine_ext.shared.layout cimport (
    SLEEP_COUNT_SHIFT, SLEEP_CYCLE, SLEEP_ENGINE, SLEEP_FULL, SLEEP_IN_ENTRY, SLEEP_RELAY, SLEEP_WAITER, UNNAMED, Status,
    engine_entry, rank_page,
)
from engine_ext.shared.segment cimport (
    bit, claimed, coordinates, relays, ring, ring_both, schedule_next, to_coordinator_time, wake, wake_others, wake_unfenced,
    world_left,
)

cdef extern from "platform/cpu.h" nogil:
    uint64_t engine_float_enter()
    void engine_float_leave(uint64_t theirs)

cdef enum:
    LOOK_AT_CLOCK = 8           # passes that move something, or spins, between two looks at the clock: small ones take fewer
    YIELD_CHUNKS = 2            # most chunks of a small entry in progress, for yielding: a small all-to-all has two
    HANDED_BYTES = 1 << 20      # a caller that does not wait moves no longer entry: it would take more time than a wake-up
    YIELD_BYTES = 65536         # a larger operation takes longer than a sleep: a core that computes would get all of each slice
    TURN_PASSES = 8             # passes that move something before the engine thread looks at the other engines of its process
    STOP_POLL_NS = 1000000      # nanoseconds between two tries to take the role, as the engine stops


# ---- a pass -----------------------------------------------------------------------------------------------------------------

cdef bint drive_once(State* e) noexcept nogil:
    """Do all that can be done now, without waiting. Return whether anything was done. The caller holds the role."""
    cdef bint moved = False, full, delayed = network_delayed_until(e.network) != 0
    cdef uint64_t tail, drained
    cdef int32_t left
    if load_acquire(e.segment.abort) != 0:          # pairs with the compare-and-swap of abort_world
        network_relay(e.network)
        if load32_relaxed(&e.failed):
            return False
        # A rank that left has done its share of all that was scheduled: a call that needs no other rank still succeeds.
        if world_left(&e.segment):
            run_schedule(e)
        network_send_failure_cause(e.network)
        fail_everything(e)
        return True
    if load32_acquire(&e.parted):                   # pairs with the compare-and-swap of end_for_left
        if load32_relaxed(&e.failed):
            return False
        fail_everything(e)
        return True
    if claimed(&e.segment):
        claim_await(e)
        return False
    if coordinates(&e.segment):
        if load32_acquire(&e.wanted_new):
            pthread_mutex_lock(&e.lock)
            coordinator_set_knobs(&e.coordinator, &e.wanted)
            store32_relaxed(&e.wanted_new, 0)
            pthread_mutex_unlock(&e.lock)
        tail, left, full = e.coordinator.writer.tail, waiting(&e.coordinator), e.coordinator.append_again
        coordinator_step(&e.coordinator)
        if e.coordinator.writer.tail != tail:
            wake_others(&e.segment, 0)
            moved = True
        elif e.coordinator.drained:
            wake_others(&e.segment, 0)
        e.coordinator.drained = False
        store32_relaxed(&e.segment.coordinator.schedule_full, e.coordinator.append_again)
        observe_readiness(e)
        # The values that announce_sleep publishes have changed: announce them again before sleeping.
        moved |= waiting(&e.coordinator) != left or e.coordinator.append_again != full
    if backlog_submit(e):                                   # before waiters of Python learn that there is room
        notify_leader(e, -1, 0, True)
        moved = True
    network_relay(e.network)
    drained = load_acquire(&e.segment.coordinator.drained[e.segment.rank])      # pairs with the coordinator's drain
    if drained != e.drained:                                # no entry tells this to a waiter that does not drive
        e.drained = drained
        turns_retry(e)
        wake_waiters(e)
    if run_schedule(e):
        network_relay(e.network)
        moved = True
    observe_readiness(e)
    return moved or (delayed and network_delayed_until(e.network) == 0)      # this, too, changes what announce_sleep publishes


cdef uint64_t compute_deadline(State* e) noexcept nogil:
    """Return when the role's holder has to look again by itself: nanoseconds, monotonic; NEVER: only others can bring news."""
    cdef uint64_t when, stall, delayed_until
    if load32_relaxed(&e.failed):
        return NEVER
    if claimed(&e.segment):
        return claim_deadline(e)
    when = coordinator_deadline(&e.coordinator) if coordinates(&e.segment) else NEVER
    delayed_until = network_delayed_until(e.network)
    if delayed_until and (when == NEVER or delayed_until < when):
        when = delayed_until
    stall = stall_deadline(e)
    return stall if when == NEVER or (stall != NEVER and stall < when) else when


cdef void announce_sleep(State* e, uint32_t door, uint32_t count) noexcept nogil:
    """Announce that this rank is about to sleep on `door`, whose count is `count`. The caller then fences and looks again
    (I8)."""
    cdef uint32_t asleep = door | count << SLEEP_COUNT_SHIFT
    network_rest(e.network)
    if e.entry != NULL:
        executor_needs(&e.executor)
        asleep |= SLEEP_IN_ENTRY
    if coordinates(&e.segment):
        if e.coordinator.append_again:
            asleep |= SLEEP_FULL
        if waiting(&e.coordinator):
            asleep |= SLEEP_CYCLE
    elif relays(&e.segment):
        asleep |= SLEEP_RELAY
        if network_delayed_until(e.network):
            asleep |= SLEEP_CYCLE
        if load32_acquire(&e.segment.coordinator.schedule_full):
            asleep |= SLEEP_FULL
    store32_release(&e.segment.mine.asleep, asleep)


cdef uint64_t remaining_ns(uint64_t when) noexcept nogil:
    """Return the nanoseconds from now to `when`, as door_sleep wants them: at least 1; 0 for NEVER: no limit."""
    cdef uint64_t now
    if when == NEVER:
        return 0
    now = now_ns()
    return max(age_ns(when, now), <uint64_t>1)


# ---- the engine thread's turn -----------------------------------------------------------------------------------------------

cdef bint is_due(const State* e) noexcept nogil:
    """Return whether this engine's door was rung, or its time has come, since the engine thread last drove it."""
    return e.moved or door_count(&e.segment.mine.door[SLEEP_ENGINE]) != e.driven_at or (e.due != NEVER and now_ns() >= e.due)


cdef bint drive_unattended(State* e) noexcept nogil:
    """Drive an engine in which nobody waits, until somebody does. Return whether it is due again at once. Called by the engine
    thread alone."""
    cdef rank_page* mine = e.segment.mine
    cdef int passes = 0
    e.driven_at, e.due, e.moved = door_count(&mine.door[SLEEP_ENGINE]), NEVER, False
    full_fence(FENCE_TAKE)                      # the door is read before the role; pairs with the fence in give_back
    if cas32(&e.role, Role.ENGINE_ASLEEP, Role.ENGINE):         # else a waiter drives, and rings if it leaves work behind
        store32_relaxed(&mine.asleep, 0)
        while passes < TURN_PASSES and drive_once(e) and not load32_relaxed(&e.waiters):
            passes += 1
        announce_sleep(e, SLEEP_ENGINE, e.driven_at)
        full_fence(FENCE_ENGINE)                            # announced before the look; pairs with the fence in wake()
        e.moved = drive_once(e)
        stall_check(e)
        e.due = compute_deadline(e)
        store32_release(&e.role, Role.ENGINE_ASLEEP)
        full_fence(FENCE_ROLE)                  # role given back before the look for waiters; pairs with driver_wait
        if load32_relaxed(&e.waiters):
            door_ring(&e.local_door, DOOR_EVERYBODY)
    return e.moved


cdef void driver_stop(State* e) noexcept nogil:
    """Fail all operations in flight, once the engine thread has left this engine: no thread of this process waits any longer. A
    thread that drives gives the role back after its pass and does not take it again."""
    ring_both(&e.segment, e.segment.rank)
    while not cas32(&e.role, Role.ENGINE_ASLEEP, Role.ENGINE):
        door_sleep(&e.local_door, door_count(&e.local_door), STOP_POLL_NS)
    fail_everything(e)
    store32_release(&e.role, Role.ENGINE_ASLEEP)


cdef void driver_answer(State* e) noexcept nogil:
    """Answer a ping as a sleeper does. Called once nobody drives any more and the rank has not left yet."""
    store32_release(&e.segment.mine.asleep, SLEEP_ENGINE | door_count(&e.segment.mine.door[SLEEP_ENGINE]) << SLEEP_COUNT_SHIFT)


# ---- submitting -------------------------------------------------------------------------------------------------------------

cdef void driver_count_unnamed(State* e, int kind, uint64_t count) noexcept nogil:
    """Publish the number of unnamed operations of a kind that this rank has submitted. The caller holds the lock, or all ranks
    join."""
    store_relaxed(&e.unnamed[kind], count)
    store_relaxed(&e.segment.mine.unnamed[kind], count)


cdef void driver_note_thread(State* e) noexcept nogil:
    """Note whether a single thread has used this engine: only then does its wait mean that this rank submits nothing more."""
    cdef uint64_t thread = <uint64_t>pthread_self(), first
    cas(&e.caller, 0, thread)
    first = load_relaxed(&e.caller)
    if first != thread:
        note_another_thread(e)


cdef void driver_note_done(State* e) noexcept nogil:
    """Note that a thread of the engine's own will call a `done` callback, which may call any engine of this rank."""
    cdef State* world = e.world
    cdef State* part
    if load32_relaxed(&world.calls_back):
        return
    pthread_mutex_lock(&world.lock)
    store32_relaxed(&world.calls_back, 1)       # for sets that are formed later, too: pairs with engines_enter
    note_another_thread(world)
    part = world.sets
    while part != NULL:
        note_another_thread(part)
        part = part.next_set
    pthread_mutex_unlock(&world.lock)


cdef void note_another_thread(State* e) noexcept nogil:
    """Note that a wait of this engine's first thread no longer means that this rank submits nothing more."""
    if not load32_relaxed(&e.many_threads):
        store32_relaxed(&e.many_threads, 1)
        store_release(&e.segment.mine.waits_unnamed, 0)    # the first thread wrote it, as the rank's only one


cdef uint32_t driver_label(char* label, int kind, uint64_t number) noexcept nogil:
    """Write the name of the unnamed operation of a kind that follows `number` others, in at most LABEL_BYTES. Return its
    length."""
    cdef const char* begin = kind_name(kind)
    cdef uint32_t used = <uint32_t>strlen(begin), left = <uint32_t>(number % UNNAMED), unit = 1
    memcpy(label, begin, used)
    memcpy(label + used, b".noname.", 8)        # by hand: printf takes as long as a small operation's communication
    used += 8
    while unit * 10 <= left:
        unit *= 10
    while unit:
        label[used] = <char>(c"0" + left // unit % 10)
        unit //= 10
        used += 1
    label[used] = 0
    return used


cdef int submit_unnamed(State* e, Target* target, Op* op, Record** record, uint64_t now) noexcept nogil:
    """Submit an unnamed operation. It takes the next number of its kind, and gives it back if it cannot be submitted."""
    cdef int kind = op.meta.kind, status
    cdef uint64_t number = load_relaxed(&e.unnamed[kind])
    target.text_bytes = driver_label(target.label, kind, number)
    record[0] = table_record(&e.table, target.label, target.text_bytes)
    if record[0] == NULL:
        return Status.NO_MEMORY
    op.number = number + 1
    # Published before the operation is submitted: a rank that sees the operation, or `waits_unnamed`, sees the number too.
    driver_count_unnamed(e, kind, number + 1)
    status = submit_record(e, record[0], op, now)
    if status != Status.OK:
        driver_count_unnamed(e, kind, number)
    return status


cdef int submit_record(State* e, Record* record, Op* op, uint64_t now) noexcept nogil:
    """Submit an operation, or put it into the backlog. An operation that needs a request goes there at once if others wait there.
    A call that was refused because its name is in flight is announced when that is over, and meets the other ranks' operations
    then."""
    cdef bint patient = load32_relaxed(&op.flags) & OP_PATIENT != 0
    cdef int status
    if record.queued:               # Python waits for the operation in flight under the name, or else for room
        status = Status.DUPLICATE
        if op.number or record.queued == record.failing:
            if record.inflight == NULL:
                status = Status.NO_ROOM
            elif fails(record.inflight):
                status = Status.AFTER_FAILURE
    elif patient and e.backlog != NULL and record.id < 0 and record.inflight == NULL:
        status = Status.NO_ROOM
    else:
        status = table_submit(&e.table, record, op, now)
        if status == Status.OK:
            observe_submission(e, op)
    if patient and (status == Status.NO_ROOM or status == Status.AFTER_FAILURE
                    or (status == Status.DUPLICATE and (op.number or fails(op) or load32_relaxed(&op.flags) & OP_IN_TURN))):
        backlog_add(e, record, op)
        return Status.OK
    return status


cdef int submit(State* e, Target* target, Op* op, int32_t* id, uint64_t now, uint32_t* recording) noexcept nogil:
    """Submit an operation. `id` receives the id under which it travels, -1 for a request.

    On success it may be done as soon as the lock is free. If it is abandoned (OP_ABANDONED), it may then be freed, so its caller
    must not read it again. Any other is held by the caller, by its handle or its lingering native call, until the wait for it has
    ended: it may be read after this.

    `recording` not NULL: the caller is blocked from `now` on, and `recording` receives the value for observe_wait_ends. NULL:
    `now` may be 0.
    """
    cdef Record* record = target.record
    cdef int status
    pthread_mutex_lock(&e.lock)
    if recording != NULL:
        recording[0] = observe_call_begins(e, now)
    if load32_relaxed(&e.failed):
        status = Status.FAILED_WORLD
    elif e.joined:
        status = Status.JOINED
    else:
        if record == NULL and target.text == NULL:
            status = submit_unnamed(e, target, op, &record, now)
        else:
            if record == NULL:
                record = table_record(&e.table, target.text, target.text_bytes)
            status = submit_record(e, record, op, now) if record != NULL else Status.NO_MEMORY
        if status == Status.OK:
            id[0] = record.id
    pthread_mutex_unlock(&e.lock)
    return status


cdef Record* driver_pin(State* e, const char* text, uint32_t text_bytes) noexcept nogil:
    """Return the record of a name, pinned until driver_unpin; NULL without memory."""
    cdef Record* record
    pthread_mutex_lock(&e.lock)
    record = table_record(&e.table, text, text_bytes)
    if record != NULL:
        record.pins += 1
    pthread_mutex_unlock(&e.lock)
    return record


cdef void driver_unpin(State* e, Record* record) noexcept nogil:
    """Unpin a record, which frees it if nothing else refers to it."""
    pthread_mutex_lock(&e.lock)
    record.pins -= 1
    table_release(&e.table, record)
    pthread_mutex_unlock(&e.lock)


cdef void notify_leader(State* e, int32_t id, uint64_t nbytes, bint awaited) noexcept nogil:
    """Wake the leader if it sleeps and this submission may be what it waits for (protocol, rule 10). `nbytes` is the uncompressed
    size: it affects only how soon the leader is woken."""
    cdef uint32_t asleep
    cdef int r
    full_fence(FENCE_SUBMIT)                                # the bit is written before the look at `asleep`, as in wake()
    asleep = load32_relaxed(&e.segment.pages[e.segment.leader].asleep)
    if asleep == 0 or (id >= 0 and not table_brought_by_all(&e.table, id)):
        return
    count_up(&e.brought_bytes, nbytes)
    if asleep & SLEEP_CYCLE and not awaited and load_relaxed(&e.brought_bytes) < load_relaxed(&e.fusion_threshold):
        for r in range(e.segment.size):
            if id >= 0 and bit(e.segment.pages[r].awaited, id):
                break
        else:
            return                              # the end of the cycle comes soon enough
    store_relaxed(&e.brought_bytes, 0)
    wake_unfenced(&e.segment, e.segment.leader, 0)


cdef int driver_submit(State* e, Target* target, Op* op) noexcept nogil:
    """Submit an operation and return at once. On success it may already be freed if it is abandoned, so its fields are read
    before."""
    cdef bint awaited = op.awaited
    cdef uint64_t nbytes = op.nbytes
    cdef int32_t id = -1
    cdef int status = submit(e, target, op, &id, 0, NULL)
    if status == Status.OK:
        notify_leader(e, id, nbytes, awaited)
        if load32_relaxed(&e.table.released):
            wake(&e.segment, e.segment.rank, 0)     # room that it waits for may have come before it was in the backlog
    return status


cdef int driver_call(State* e, Target* target, Op* op, uint64_t ns) noexcept nogil:
    """Submit an operation and wait for it, at most `ns`. Return OK when it is done, TICK, or why it was not submitted.

    The role is taken before the bit is set, so the coordinator finds this rank awake and wakes nobody. The caller's handle, or
    its lingering native call, holds `op` until this returns: it is read after it is done.
    """
    cdef uint64_t tick, theirs, ended
    cdef uint32_t recording
    cdef Goal goal
    cdef int32_t id = -1
    cdef int status
    observe_call_nears(e)
    tick = now_ns() + ns
    memset(&goal, 0, sizeof(Goal))
    goal.op = op
    op.awaited = True
    add32(&e.waiters, 1)
    if cas32(&e.role, Role.ENGINE_ASLEEP, Role.WAITER):
        theirs = engine_float_enter()
        store32_relaxed(&e.segment.mine.asleep, 0)
        status = submit(e, target, op, &id, tick - ns, &recording)
        if status == Status.OK:
            if not coordinates(&e.segment):
                notify_leader(e, id, op.nbytes, True)
            drive_until(e, &goal, tick)
        ended = e.entry_ended           # the time just now, if an entry has completed it
        give_back(e)
        add32(&e.waiters, <uint32_t>-1)
        engine_float_leave(theirs)
        if not (is_goal_met(e, &goal) and op.status == Status.OK and op.ticket == 0 and ended > tick - ns):
            ended = now_ns()
        observe_wait_ends(e, recording, tick - ns, ended)
    else:
        add32(&e.waiters, <uint32_t>-1)
        status = driver_submit(e, target, op)
    if status == Status.OK and not is_goal_met(e, &goal):
        ns = age_ns(tick, now_ns())             # the rest of the time
        return driver_wait(e, &goal, ns) if ns else Status.TICK
    return status


cdef int driver_submit_and_drive(State* e, Target* target, Op* op) noexcept nogil:
    """Submit an operation for which nobody waits here. Return OK, or why it was not submitted.

    On the coordinator's rank, while nobody drives, this thread does all that can be done at once: then no thread of this rank has
    to wake up for the other ranks. Longer entries are left to the engine thread. The caller holds `op` by a handle: it is read
    after it is submitted.
    """
    cdef uint64_t theirs
    cdef Goal goal
    cdef int32_t id = -1
    cdef int status
    memset(&goal, 0, sizeof(Goal))
    goal.op = op
    if (max(op.nbytes, op.memory_bytes) <= HANDED_BYTES and coordinates(&e.segment)
            and cas32(&e.role, Role.ENGINE_ASLEEP, Role.WAITER)):
        add32(&e.waiters, 1)            # give_back expects the caller to be counted
        theirs = engine_float_enter()
        store32_relaxed(&e.segment.mine.asleep, 0)
        status = submit(e, target, op, &id, 0, NULL)
        while status == Status.OK and not is_goal_met(e, &goal) and not is_in_long_entry(e) and drive_once(e):
            pass
        give_back(e)
        add32(&e.waiters, <uint32_t>-1)
        engine_float_leave(theirs)
        return status
    return driver_submit(e, target, op)


cdef inline bint is_in_long_entry(const State* e) noexcept nogil:
    """Return whether the entry in progress moves more than a caller that does not wait may move. The caller holds the role."""
    return e.entry != NULL and e.entry.bytes > HANDED_BYTES


# ---- waiting ----------------------------------------------------------------------------------------------------------------

cdef inline bint is_done(Op* op) noexcept nogil:
    """Return whether `op` is done. The caller holds the operation."""
    return load32_acquire(&op.flags) & OP_DONE      # pairs with complete_op(): the results are in place


cdef inline bint is_goal_met(State* e, const Goal* goal) noexcept nogil:
    """Return whether a goal is met: the first field of Goal that is set decides."""
    if goal.op != NULL:
        return is_done(goal.op)
    if load32_relaxed(&e.failed):
        return True
    if goal.record != NULL:
        return load_pointer(<void**>&goal.record.inflight) == NULL
    if goal.idle:
        return load_pointer(<void**>&e.table.inflight) == NULL and load_pointer(<void**>&e.backlog) == NULL
    if goal.joins:
        return load32_acquire(&e.segment.joins) >= goal.joins           # pairs with end_join
    return load_acquire(&e.segment.coordinator.drained[e.segment.rank]) > goal.drained


cdef void give_back(State* e) noexcept nogil:
    """Give the role back to the sleeping engine thread, and wake that thread only if something is left to do."""
    cdef bint busy = e.entry != NULL or load32_relaxed(&e.table.released) != 0 or network_delayed_until(e.network) != 0 or (
        coordinates(&e.segment) and (waiting(&e.coordinator) or e.coordinator.append_again))
    cdef uint64_t cursor = e.segment.mine.cursor
    cdef uint32_t count = door_count(&e.segment.mine.door[SLEEP_ENGINE])
    network_stop_reading(e.network)
    # The engine thread sleeps at this count, or at an earlier one and is about to wake up. It may also sleep at a later one, when
    # a ring for an earlier sleep comes only now. Nobody would ring for this announcement then, so this thread rings.
    announce_sleep(e, SLEEP_ENGINE, count)
    store32_release(&e.role, Role.ENGINE_ASLEEP)
    full_fence(FENCE_GIVE_BACK)     # announced and given back before the looks; pairs with wake() and driver_wait
    if load32_relaxed(&e.waiters) > 1:              # one of them may take the role, or be about to leave
        door_ring(&e.local_door, DOOR_EVERYBODY)
    if (busy or door_count(&e.segment.mine.door[SLEEP_ENGINE]) != count
            or load_acquire(&e.segment.coordinator.tail) != cursor or load_acquire(e.segment.abort) != 0
            or claimed(&e.segment) or (coordinates(&e.segment) and coordinator_unseen(&e.coordinator))
            or network_unseen(e.network)):
        ring(&e.segment, e.segment.rank, SLEEP_ENGINE)


cdef inline bint is_in_small_entry(const State* e) noexcept nogil:
    """Return whether the entry in progress is small, or none is. Only the chunks of an all-to-all tell how long it is."""
    return e.entry == NULL or (e.entry.bytes <= YIELD_BYTES and e.executor.end - e.executor.first <= YIELD_CHUNKS)


cdef inline bint is_small(const State* e, const Goal* goal) noexcept nogil:
    """Return whether a caller waits for so little that the other ranks need the processor for less time than a sleep costs."""
    return goal.op != NULL and goal.op.nbytes <= YIELD_BYTES and is_in_small_entry(e)


cdef inline bint may_read(State* e) noexcept nogil:
    """Return whether a caller that spins takes in what other hosts send. Not in a large entry, nor before one begins: for these a
    second thread is worth its switches."""
    cdef const engine_entry* ahead = schedule_next(&e.segment) if e.entry == NULL else NULL
    return e.spin_ns != 0 and is_in_small_entry(e) and (ahead == NULL or ahead.bytes <= YIELD_BYTES)


cdef void drive_until(State* e, const Goal* goal, uint64_t tick) noexcept nogil:
    """Drive until the goal is met or the time `tick` has come. The caller holds the role.

    Before it sleeps it spins, where each rank has a processor. Where ranks share processors it yields: the thread that it waits
    for may be ready to run on this processor, and gets it for a system call instead of a sleep and a wake-up.
    """
    cdef rank_page* mine = e.segment.mine
    cdef uint64_t spin_end = 0, when
    cdef uint32_t door, moves = 0, spins = 0
    cdef bint reads             # whether this thread takes in what other hosts send, while it spins
    while not is_goal_met(e, goal) and not load32_acquire(&e.stop):     # pairs with engines_leave
        reads = e.network != NULL and may_read(e)
        if not reads and e.network != NULL:
            network_stop_reading(e.network)
        if drive_once(e):
            spin_end = 0
            moves += 1
            if moves % LOOK_AT_CLOCK == 0 and now_ns() >= tick:
                return
            continue
        if e.spin_ns:
            if spin_end == 0:
                spin_end = now_ns() + e.spin_ns
            if not (reads and network_read(e.network)):
                spin_pause()            # one pause for each look: some processors take 50 ns for it
            spins += 1
            if spins % LOOK_AT_CLOCK or now_ns() < spin_end:
                continue
        elif e.yield_ns and is_small(e, goal):
            if spin_end == 0:
                spin_end = now_ns() + e.yield_ns
            yield_processor()
            observe_yield(e)
            if now_ns() < spin_end:
                continue
        spin_end = 0
        network_stop_reading(e.network)
        door = door_count(&mine.door[SLEEP_WAITER])
        announce_sleep(e, SLEEP_WAITER, door)
        full_fence(FENCE_CALLER)                                # announced before the look; pairs with the fence in wake()
        if not drive_once(e) and not is_goal_met(e, goal) and not load32_acquire(&e.stop):      # the door was read before
            if now_ns() >= tick:
                store32_relaxed(&mine.asleep, 0)
                return
            stall_check(e)
            when = compute_deadline(e)
            observe_sleep(e)
            door_sleep(&mine.door[SLEEP_WAITER], door, remaining_ns(tick if when == NEVER else min(when, tick)))
            store32_relaxed(&mine.asleep, 0)
            if now_ns() >= tick and door_count(&mine.door[SLEEP_WAITER]) == door and drive_once(e):
                observe_late_wake(e)            # nobody rang, although there was something to do
        else:
            store32_relaxed(&mine.asleep, 0)


cdef int driver_wait(State* e, const Goal* goal, uint64_t ns) noexcept nogil:
    """Wait for the goal, at most `ns`. Return OK when it is met, even if its operation has failed, or TICK."""
    cdef uint64_t begun, tick, theirs
    cdef uint32_t door, recording
    if is_goal_met(e, goal):
        return Status.OK
    begun = now_ns()
    tick = begun + ns
    recording = observe_wait_begins(e, begun)
    theirs = engine_float_enter()
    add32(&e.waiters, 1)
    while not is_goal_met(e, goal):
        full_fence(FENCE_WAITER)                                # counted before the look at the role; pairs with give_back
        door = door_count(&e.local_door)
        if not load32_acquire(&e.stop) and cas32(&e.role, Role.ENGINE_ASLEEP, Role.WAITER):
            store32_relaxed(&e.segment.mine.asleep, 0)
            drive_until(e, goal, tick)
            give_back(e)
        elif not is_goal_met(e, goal):
            door_sleep(&e.local_door, door, remaining_ns(tick))
        if now_ns() >= tick:
            break
    add32(&e.waiters, <uint32_t>-1)
    engine_float_leave(theirs)
    observe_wait_ends(e, recording, begun, now_ns())
    return Status.OK if is_goal_met(e, goal) else Status.TICK


cdef void wake_timed_leader(State* e) noexcept nogil:
    """Wake a leader that sleeps until the end of a cycle: somebody waits now."""
    wake(&e.segment, e.segment.leader, SLEEP_CYCLE | SLEEP_RELAY)


cdef void driver_await(State* e, Op* op) noexcept nogil:
    """Publish that a thread waits for `op`, so that its batch closes at once."""
    cdef bint news = False
    pthread_mutex_lock(&e.lock)
    if op.record != NULL and not op.awaited:        # NULL: finished, perhaps not marked done yet
        table_await(&e.table, op, True)
        news = True
    pthread_mutex_unlock(&e.lock)
    if news:
        wake_timed_leader(e)


cdef int driver_join(State* e, uint32_t* join) noexcept nogil:
    """Submit nothing from now on until all ranks have joined. Return OK and the number of the join, or TICK while something is in
    flight."""
    cdef int status = Status.OK
    pthread_mutex_lock(&e.lock)
    if load32_relaxed(&e.failed):
        status = Status.FAILED_WORLD
    elif e.joined:
        status = Status.JOINED
    elif e.table.inflight != NULL or e.backlog != NULL:
        status = Status.TICK
    else:
        join[0] = load32_relaxed(&e.segment.joins) + 1
        e.joined = True
        store_relaxed(&e.segment.mine.joined_at, to_coordinator_time(&e.segment, now_ns()))
        # Release: this rank's submissions, all of which are done, come before; pairs with see_joined.
        store_release(&e.segment.mine.joined, join[0])
        store_release(&e.segment.mine.waits, e.segment.mine.waits + 1)
    pthread_mutex_unlock(&e.lock)
    if status == Status.OK:
        wake(&e.segment, e.segment.leader, 0)
    return status


cdef void driver_wait_for_all(State* e, bint on) noexcept nogil:
    """Publish that one more thread of this rank waits for all that the rank has in flight, or that it no longer does."""
    cdef rank_page* mine = e.segment.mine
    pthread_mutex_lock(&e.lock)
    # Release: a rank that sees it sees all earlier submissions; pairs with find_ended, and with send_up.
    store32_release(&mine.wait_all, mine.wait_all + (1 if on else -1))
    store_release(&mine.waits, mine.waits + 1)      # pairs with the coordinator's acquire
    pthread_mutex_unlock(&e.lock)
    if on:
        wake_timed_leader(e)
