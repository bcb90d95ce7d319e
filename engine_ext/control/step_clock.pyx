"""The clock of a rank's steps, and the rule by which a step is late. step_clock.pxd says what a part is."""
from libc.stdint cimport int32_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memmove, memset

from engine_ext.platform.atomics cimport load32_relaxed, load_relaxed, now_ns, store32_relaxed, store_relaxed
from engine_ext.platform.clock cimport age_ns
from engine_ext.platform.posix cimport (
    close, pthread_mutex_destroy, pthread_mutex_init, pthread_mutex_lock, pthread_mutex_unlock,
)
from engine_ext.platform.task_times cimport task_times_delay, task_times_open, task_times_thread
from engine_ext.shared.counters cimport LATE_COMPUTE, LATE_CPU, LATE_GC, LATE_INPUT, LATE_NETWORK, LATE_RANK

cdef enum:
    LEAST_NS = 500000           # a step is not late by less
    LEAST_SHARE = 10            # nor by less than the median divided by this
    SPREADS = 2                 # nor by less than so many times the spread of the steps
    LOW_SPREADS = 3             # the spread is at most so many times the distance from the lower quartile to the median
    SAMPLE_EVERY_NS = 250000    # the run delay is read at most once in this time of a step as long as the last: 1.1 us each
    SHORTEST_NS = 50000         # least time between two readings
    MOST_THREADS = 16           # looks for the run delay of a thread, as of a new one that marks steps, in FORGIVEN steps
    FORGIVEN = 1024
    MOST_OTHERS = 64            # steps in a row of another optimizer, after which that one's steps are clocked


# ---- the rule ---------------------------------------------------------------------------------------------------------------

cdef inline int find_place(const uint64_t* ordered, int count, uint64_t value) noexcept nogil:
    """Return how many of `count` ascending numbers are less than `value`."""
    cdef int low = 0, high = count, middle
    while low < high:
        middle = (low + high) // 2
        if ordered[middle] < value:
            low = middle + 1
        else:
            high = middle
    return low


cdef void window_add(StepWindow* window, uint64_t count, uint64_t value) noexcept nogil:
    """Add a step's number to a window that has seen `count` steps; the oldest is dropped if there is no room."""
    cdef int held = <int>min(count, <uint64_t>STEP_WINDOW), place
    cdef int slot = <int>(count % STEP_WINDOW)
    if held == STEP_WINDOW and window.recent[slot] == value:    # as in parts that are always 0
        return
    if held == STEP_WINDOW:
        place = find_place(window.sorted, held, window.recent[slot])
        held -= 1
        memmove(&window.sorted[place], &window.sorted[place + 1], <size_t>(held - place) * sizeof(uint64_t))
    place = find_place(window.sorted, held, value)
    memmove(&window.sorted[place + 1], &window.sorted[place], <size_t>(held - place) * sizeof(uint64_t))
    window.sorted[place], window.recent[slot] = value, value


cdef inline uint64_t quantile(const StepWindow* window, uint64_t count, int quarters) noexcept nogil:
    """Return a quartile of a window that has seen `count` steps, at least one; 2 quarters are the median."""
    return window.sorted[min(count, <uint64_t>STEP_WINDOW) * <uint64_t>quarters // 4]


cdef inline uint64_t beyond_usual(const StepRule* rule, int window, uint64_t value) noexcept nogil:
    """Return by how much a number is larger than the median of its window; 0 if it is not."""
    return age_ns(value, quantile(&rule.windows[window], rule.count, 2))


cdef inline uint64_t late_bar(const StepRule* rule) noexcept nogil:
    """Return by how much a step is longer than the median if it is late.

    The spread is the distance between the quartiles. Where many steps are late, the upper quartile is one of theirs; so the
    steps below the median, which are not, bound it.
    """
    cdef const StepWindow* window = &rule.windows[WINDOW_TOTAL]
    cdef uint64_t low = quantile(window, rule.count, 1), middle = quantile(window, rule.count, 2)
    cdef uint64_t spread = min(quantile(window, rule.count, 3) - low, (middle - low) * LOW_SPREADS)
    return max(max(<uint64_t>LEAST_NS, middle // LEAST_SHARE), spread * SPREADS)


cdef void find_cause(const StepRule* rule, const StepParts* parts, LateStep* late) noexcept nogil:
    """Find the cause of a late step: the part that is most beyond its own median.

    A rank that waits longer than usual waits for the rank that was last, if that one was late by at least half as much. If none
    was, the data took longer: that is the network's fault if something crossed hosts of which the last rank is known. Else it
    waited for some rank. A wait for a GPU, or for another thread that is blocked in the engine, looks like compute.
    """
    cdef int part, most = PART_COMPUTE
    cdef uint64_t beyond, largest = 0
    cdef uint64_t others = beyond_usual(rule, WINDOW_LATE, parts.late_ns) if parts.late_rank >= 0 else 0
    for part in range(PARTS):
        beyond = beyond_usual(rule, part, parts.ns[part])
        if beyond > largest:
            most, largest = part, beyond
    late.rank = -1
    if most == PART_WAIT or (most == PART_COMPUTE and (parts.device or parts.elsewhere) and 2 * others >= late.excess):
        late.cause = LATE_NETWORK if parts.far else LATE_RANK
        if 2 * others >= min(largest, late.excess):
            late.cause, late.rank = LATE_RANK, parts.late_rank
    elif most == PART_INPUT:
        late.cause = LATE_INPUT
    elif most == PART_GC:
        late.cause = LATE_GC
    else:
        late.cause = LATE_CPU if most == PART_CPU else LATE_COMPUTE


cdef bint step_rule_judge(StepRule* rule, const StepParts* parts, LateStep* late) noexcept nogil:
    """Judge a step by those before it, and remember it. Return whether it was late; then `late` has the cause, the rank and by
    how much."""
    cdef uint64_t total = 0
    cdef bint is_late = False
    cdef int part
    for part in range(PARTS):
        total += parts.ns[part]
    if rule.count >= STEP_FIRST:
        late.excess = beyond_usual(rule, WINDOW_TOTAL, total)
        is_late = late.excess > late_bar(rule)
        if is_late:
            find_cause(rule, parts, late)
    for part in range(PARTS):
        window_add(&rule.windows[part], rule.count, parts.ns[part])
    window_add(&rule.windows[WINDOW_TOTAL], rule.count, total)
    window_add(&rule.windows[WINDOW_LATE], rule.count, parts.late_ns)
    rule.count += 1
    return is_late


# ---- the clock --------------------------------------------------------------------------------------------------------------

cdef StepClock* step_clock_open() noexcept nogil:
    """Make a clock that is off; NULL without memory: then no step is clocked."""
    cdef StepClock* clock = <StepClock*>calloc(1, sizeof(StepClock))
    if clock != NULL:
        pthread_mutex_init(&clock.lock, NULL)
        clock.delays = -1
    return clock


cdef void step_clock_forked(StepClock* clock) noexcept nogil:
    """Close the clock's file in a forked child, where some thread may have held the lock for ever; NULL: do nothing."""
    if clock != NULL and clock.delays >= 0:
        close(clock.delays)
        clock.delays = -1


cdef void step_clock_close(StepClock* clock, bint alive) noexcept nogil:
    """Free a clock that no thread uses any more; NULL: do nothing. Not `alive`: in a forked child."""
    if clock != NULL:
        if alive:
            if clock.delays >= 0:
                close(clock.delays)
            pthread_mutex_destroy(&clock.lock)
        free(clock)


cdef void step_clock_switch(StepClock* clock, bint on) noexcept nogil:
    """Clock steps from now on, or no more; NULL: do nothing."""
    if clock != NULL:
        pthread_mutex_lock(&clock.lock)
        clock.begun = 0         # the step in progress is clocked in part
        clock.inputs, clock.collecting, clock.waiting, clock.foreign_gc = 0, False, False, 0
        store32_relaxed(&clock.on, on)
        pthread_mutex_unlock(&clock.lock)


cdef inline bint marks_steps(const StepClock* clock) noexcept nogil:
    """Return whether the calling thread marks the steps. Only it makes this true, so it needs no lock to ask."""
    return load_relaxed(&clock.thread) == task_times_thread()


cdef void settle(StepClock* clock, uint64_t now) noexcept nogil:
    """Add the time up to `now` to the part in which the thread is. The caller holds the lock."""
    cdef int part = PART_COMPUTE
    cdef uint64_t spent = age_ns(now, clock.since)
    if clock.waiting:
        part = PART_WAIT
    elif clock.collecting:
        part = PART_GC
    elif clock.inputs:
        part = PART_INPUT
    clock.parts.ns[part] += spent
    clock.unread[part] += spent
    clock.since = max(now, clock.since)


cdef inline void move_time(StepClock* clock, int source, int part, uint64_t ns) noexcept nogil:
    """Move time that was spent since the last reading from one part to another."""
    clock.parts.ns[source] -= ns
    clock.parts.ns[part] += ns


cdef void spread_delay(StepClock* clock, uint64_t delay) noexcept nogil:
    """Take run delay out of the parts since the last reading, in proportion to their lengths. A wait that yields is ready to run
    while others run, as it wants: that is no delay. The caller holds the lock."""
    cdef uint64_t total = 0
    cdef bint yielded = load32_relaxed(&clock.yielded) != 0
    cdef double share
    cdef int part
    for part in range(PARTS):
        total += clock.unread[part]
    share = <double>min(delay, total) / <double>total if total else 0.0
    for part in range(PARTS):
        if part != PART_CPU and not (part == PART_WAIT and yielded):
            move_time(clock, part, PART_CPU, min(<uint64_t>(share * <double>clock.unread[part]), clock.unread[part]))
    memset(clock.unread, 0, sizeof(clock.unread))
    store32_relaxed(&clock.yielded, 0)


cdef void read_delay(StepClock* clock, bint ends) noexcept nogil:
    """Read the run delay of the calling thread, which marks steps, if it is time to. `ends`: at the end of a step, where it is
    read even if the readings of this step are used up. The caller holds no lock of the clock."""
    cdef uint64_t delayed = 0
    cdef int fd = -1, broken = -1
    cdef bint known
    pthread_mutex_lock(&clock.lock)
    if (ends or (clock.begun and clock.samples)) and age_ns(now_ns(), clock.read_at) >= SHORTEST_NS:
        fd = clock.delays
        clock.reading = fd >= 0
        clock.samples -= clock.samples > 0
    pthread_mutex_unlock(&clock.lock)
    if fd < 0:
        return
    known = task_times_delay(fd, &delayed)
    pthread_mutex_lock(&clock.lock)
    clock.reading = False
    if known:
        clock.read_at = now_ns()
        settle(clock, clock.read_at)
        spread_delay(clock, age_ns(delayed, clock.delayed))
        clock.delayed = delayed
    else:
        broken, clock.delays = fd, -1
    pthread_mutex_unlock(&clock.lock)
    if broken >= 0:
        close(broken)


cdef void step_clock_sample(StepClock* clock) noexcept nogil:
    """Read the run delay if the calling thread is about to begin or end another part. The caller holds no lock."""
    if load32_relaxed(&clock.on) and marks_steps(clock):
        read_delay(clock, False)


cdef void step_clock_wait(StepClock* clock, bint begins, uint64_t now) noexcept nogil:
    """Note that the calling thread begins or ends to be blocked in the engine."""
    if not load32_relaxed(&clock.on):
        return
    if not marks_steps(clock):
        if not load32_relaxed(&clock.elsewhere):        # a line that many threads write would be slow
            store32_relaxed(&clock.elsewhere, 1)
        return
    pthread_mutex_lock(&clock.lock)
    if clock.begun:
        settle(clock, now)
        clock.waiting = begins
    pthread_mutex_unlock(&clock.lock)


cdef void step_clock_input(StepClock* clock, bint begins) noexcept nogil:
    """Note that the calling thread begins or ends to get a batch. Calls may be nested."""
    if not load32_relaxed(&clock.on) or not marks_steps(clock):
        return
    read_delay(clock, False)
    pthread_mutex_lock(&clock.lock)
    if clock.begun:
        settle(clock, now_ns())
        if begins:
            clock.inputs += 1
        elif clock.inputs:
            clock.inputs -= 1
    pthread_mutex_unlock(&clock.lock)


cdef void note_foreign_collection(StepClock* clock, bint begins, uint64_t now) noexcept nogil:
    """Note that another thread than the one that marks steps begins or ends to collect garbage. It holds that one up, unless that
    one is blocked in the engine. The caller holds the lock."""
    cdef uint64_t lasted
    cdef int part
    settle(clock, now)
    if begins:
        clock.foreign_gc = 0 if clock.waiting else now
        clock.foreign_part = PART_INPUT if clock.inputs else PART_COMPUTE
        clock.foreign_base = clock.parts.ns[clock.foreign_part]
    elif clock.foreign_gc:
        part = clock.foreign_part
        lasted = min(age_ns(now, clock.foreign_gc), age_ns(clock.parts.ns[part], clock.foreign_base))
        move_time(clock, part, PART_GC, lasted)
        lasted = min(lasted, clock.unread[part])
        clock.unread[part] -= lasted
        clock.unread[PART_GC] += lasted
        clock.foreign_gc = 0


cdef void step_clock_collection(StepClock* clock, bint begins) noexcept nogil:
    """Note that the calling thread begins or ends to collect garbage."""
    cdef bint mine = marks_steps(clock)
    if not load32_relaxed(&clock.on) or load_relaxed(&clock.thread) == 0:
        return
    if mine:
        read_delay(clock, False)
    pthread_mutex_lock(&clock.lock)
    if clock.begun and mine:
        settle(clock, now_ns())
        clock.collecting = begins
    elif clock.begun:
        note_foreign_collection(clock, begins, now_ns())
    pthread_mutex_unlock(&clock.lock)


cdef void step_clock_entry(
    StepClock* clock, int32_t rank, uint64_t late_ns, uint64_t submitted, bint device, bint far,
) noexcept nogil:
    """Note that an entry is done for which `rank` of the world was last, `late_ns` after this one. This rank submitted it at
    `submitted`; with `rank` -1 it was last itself. `far`: ranks on several hosts took part.

    Of entries that overlap here only the latest counts: the rank waited for them at the same time.
    """
    if not load32_relaxed(&clock.on) or load_relaxed(&clock.thread) == 0:
        return
    pthread_mutex_lock(&clock.lock)
    if rank < 0:
        late_ns = 0
    if submitted >= clock.chain_end:
        clock.parts.late_ns += clock.chain_ns
        clock.chain_ns = late_ns
    else:
        clock.chain_ns = max(clock.chain_ns, late_ns)
    if late_ns > clock.latest_ns:
        clock.latest_ns, clock.parts.late_rank = late_ns, rank
    clock.parts.device |= device
    clock.parts.far |= far
    clock.chain_end = now_ns()
    pthread_mutex_unlock(&clock.lock)


cdef bint belongs(StepClock* clock, const void* engine, int optimizer) noexcept nogil:
    """Return whether steps of `optimizer` of `engine` are clocked. They are those of one: of two that take turns, each has other
    steps. The caller holds the lock."""
    if clock.engine != engine or clock.optimizer != optimizer:
        clock.others += 1
        if clock.engine != NULL and clock.others < MOST_OTHERS:
            return False
        clock.engine, clock.optimizer, clock.begun = engine, optimizer, 0
        memset(&clock.rule, 0, sizeof(StepRule))
    clock.others = 0
    return True


cdef bint end_step(StepClock* clock, uint64_t now, LateStep* late) noexcept nogil:
    """End the step in progress, if there is one, and begin the next. Return whether it was late. The caller holds the lock."""
    cdef bint is_late = False
    settle(clock, now)
    clock.steps += 1
    if clock.begun:
        clock.parts.late_ns += clock.chain_ns
        clock.parts.elsewhere = load32_relaxed(&clock.elsewhere) != 0
        late.number, late.begun, late.ended, late.parts = clock.steps, clock.begun, now, clock.parts
        is_late = step_rule_judge(&clock.rule, &clock.parts, late)
        if is_late:
            clock.kept[clock.late % LATE_KEPT] = late[0]
            clock.late += 1
    memset(&clock.parts, 0, sizeof(StepParts))
    memset(clock.unread, 0, sizeof(clock.unread))
    clock.parts.late_rank = -1
    clock.samples = <uint32_t>min(age_ns(now, clock.begun) // SAMPLE_EVERY_NS, <uint64_t>STEP_SAMPLES) if clock.begun else 0
    clock.begun = clock.since = now
    clock.chain_ns = clock.latest_ns = clock.foreign_gc = 0
    clock.inputs = 0            # an interrupt may have hidden the end of one
    store32_relaxed(&clock.elsewhere, 0)
    return is_late


cdef bint step_clock_mark(StepClock* clock, const void* engine, int optimizer, LateStep* late, bint* blind) noexcept nogil:
    """Note that the calling thread has ended a step of an optimizer. Return whether it was late; then `late` says why. `blind`
    receives whether it is not known how long the thread waits for a processor."""
    cdef uint64_t delayed = 0
    cdef bint adopts, opens, is_late = False
    cdef int fd = -1, former = -1
    if not load32_relaxed(&clock.on):
        return False
    adopts = not marks_steps(clock)
    if not adopts:
        read_delay(clock, True)
    pthread_mutex_lock(&clock.lock)
    opens = belongs(clock, engine, optimizer) and (adopts or clock.delays < 0) and clock.opened < MOST_THREADS
    adopts &= clock.others == 0
    clock.opened += opens
    pthread_mutex_unlock(&clock.lock)
    if opens:
        fd = task_times_open()
        if fd >= 0 and not task_times_delay(fd, &delayed):
            close(fd)
            fd = -1
    pthread_mutex_lock(&clock.lock)
    if clock.others == 0 and not clock.reading and (adopts or marks_steps(clock)):
        if adopts or fd >= 0:
            former = clock.delays
            clock.delays, clock.delayed, clock.read_at = fd, delayed, now_ns()
            fd = -1
        if adopts:
            store_relaxed(&clock.thread, task_times_thread())
            clock.collecting, clock.waiting, clock.begun = False, False, 0
        is_late = end_step(clock, now_ns(), late)
        if clock.steps % FORGIVEN == 0:
            clock.opened = 0
    blind[0] = clock.delays < 0
    pthread_mutex_unlock(&clock.lock)
    if fd >= 0:
        close(fd)
    if former >= 0:
        close(former)
    return is_late
