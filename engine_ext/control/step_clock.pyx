"""The clock of a rank's steps, and the rule by which a step is late. step_clock.pxd says what a part is."""
from libc.stdint cimport int32_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memmove, memset

from engine_ext.platform.atomics cimport load32_relaxed, now_ns, store32_relaxed
from engine_ext.platform.clock cimport age_ns
from engine_ext.platform.posix cimport (
    close, pthread_equal, pthread_mutex_destroy, pthread_mutex_init, pthread_mutex_lock, pthread_mutex_unlock, pthread_self,
)
from engine_ext.platform.task_times cimport task_times_delay, task_times_open
from engine_ext.shared.counters cimport LATE_COMPUTE, LATE_CPU, LATE_GC, LATE_INPUT, LATE_NETWORK, LATE_RANK

cdef enum:
    LEAST_NS = 500000           # a step is not late by less
    LEAST_SHARE = 10            # nor by less than the median divided by this
    SPREADS = 2                 # nor by less than so many times the spread of the steps
    LOW_SPREADS = 3             # the spread is at most so many times the distance from the lower quartile to the median
    SAMPLE_EVERY_NS = 250000    # the run delay is read at most once in this time of a step as long as the last: 0.7 us each
    SHORTEST_NS = 20000         # the run delay is not read at the end of a shorter time in one part
    MOST_THREADS = 16           # changes of the thread that marks steps, after which its run delay is not looked for any more
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


cdef void find_cause(const StepRule* rule, const StepParts* parts, bint far, LateStep* late) noexcept nogil:
    """Find the cause of a late step: the part that is most beyond its own median.

    A rank that waits longer than usual waits for the rank that was last, if that one was late by at least half as much. If none
    was, the data took longer; that is the network's fault where there is one.
    """
    cdef int part, most = PART_COMPUTE
    cdef uint64_t beyond, largest = 0
    cdef uint64_t others = beyond_usual(rule, WINDOW_LATE, parts.late_ns) if parts.late_rank >= 0 else 0
    for part in range(PARTS):
        beyond = beyond_usual(rule, part, parts.ns[part])
        if beyond > largest:
            most, largest = part, beyond
    late.rank = -1
    if most == PART_WAIT or (most == PART_COMPUTE and parts.device and 2 * others >= late.excess):
        late.cause = LATE_NETWORK if far else LATE_RANK
        if 2 * others >= min(largest, late.excess):
            late.cause, late.rank = LATE_RANK, parts.late_rank
    elif most == PART_INPUT:
        late.cause = LATE_INPUT
    elif most == PART_GC:
        late.cause = LATE_GC
    else:
        late.cause = LATE_CPU if most == PART_CPU else LATE_COMPUTE


cdef bint step_rule_judge(StepRule* rule, const StepParts* parts, bint far, LateStep* late) noexcept nogil:
    """Judge a step by those before it, and remember it. Return whether it was late; then `late` has the cause, the rank and by
    how much. `far`: the job has several hosts."""
    cdef uint64_t total = 0
    cdef bint is_late = False
    cdef int part
    for part in range(PARTS):
        total += parts.ns[part]
    if rule.count >= STEP_FIRST:
        late.excess = beyond_usual(rule, WINDOW_TOTAL, total)
        is_late = late.excess > late_bar(rule)
        if is_late:
            find_cause(rule, parts, far, late)
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
        clock.delays, clock.optimizer = -1, -1
    return clock


cdef void step_clock_close(StepClock* clock) noexcept nogil:
    """Free a clock that no thread uses any more; NULL: do nothing."""
    if clock != NULL:
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


cdef inline bint is_clocked(const StepClock* clock) noexcept nogil:
    """Return whether the calling thread is in a step that is clocked. The caller holds the lock."""
    return clock.begun != 0 and pthread_equal(clock.thread, pthread_self())


cdef bint read_delay(StepClock* clock) noexcept nogil:
    """Add the run delay since the last reading to what is pending. Return False if it cannot be read."""
    cdef uint64_t delayed = 0
    if not task_times_delay(clock.delays, &delayed):
        return False
    clock.pending += age_ns(delayed, clock.delayed)
    clock.delayed = delayed
    return True


cdef void settle(StepClock* clock, uint64_t now) noexcept nogil:
    """Add the time up to `now` to the part in which the thread is."""
    cdef int part = PART_COMPUTE
    cdef uint64_t spent = age_ns(now, clock.since), delay
    if clock.waiting:
        part = PART_WAIT
    elif clock.collecting:
        part = PART_GC
    elif clock.inputs:
        part = PART_INPUT
    if clock.samples and spent >= SHORTEST_NS:
        clock.samples -= 1
        read_delay(clock)
    delay = min(spent, clock.pending)
    clock.pending -= delay
    clock.parts.ns[part] += spent - delay
    clock.parts.ns[PART_CPU] += delay
    clock.since = max(now, clock.since)


cdef void step_clock_wait(StepClock* clock, bint begins, uint64_t now) noexcept nogil:
    """Note that the calling thread begins or ends to be blocked in the engine."""
    if not load32_relaxed(&clock.on):
        return
    pthread_mutex_lock(&clock.lock)
    if is_clocked(clock):
        settle(clock, now)
        clock.waiting = begins
    pthread_mutex_unlock(&clock.lock)


cdef void step_clock_input(StepClock* clock, bint begins) noexcept nogil:
    """Note that the calling thread begins or ends to get a batch. Calls may be nested."""
    if not load32_relaxed(&clock.on):
        return
    pthread_mutex_lock(&clock.lock)
    if is_clocked(clock):
        settle(clock, now_ns())
        if begins:
            clock.inputs += 1
        elif clock.inputs:
            clock.inputs -= 1
    pthread_mutex_unlock(&clock.lock)


cdef void step_clock_collection(StepClock* clock, bint begins) noexcept nogil:
    """Note that the calling thread begins or ends to collect garbage. Another thread's collection holds the thread that marks
    steps up, too, unless that one is blocked in the engine."""
    cdef uint64_t now, lasted
    cdef int part
    if not load32_relaxed(&clock.on):
        return
    pthread_mutex_lock(&clock.lock)
    now = now_ns()
    if is_clocked(clock):
        settle(clock, now)
        clock.collecting = begins
    elif clock.begun and begins:
        settle(clock, now)
        clock.foreign_gc = 0 if clock.waiting else now
    elif clock.begun and clock.foreign_gc:
        settle(clock, now)
        part = PART_INPUT if clock.inputs else PART_COMPUTE
        lasted = min(age_ns(now, clock.foreign_gc), clock.parts.ns[part])
        clock.parts.ns[part] -= lasted
        clock.parts.ns[PART_GC] += lasted
        clock.foreign_gc = 0
    pthread_mutex_unlock(&clock.lock)


cdef void step_clock_entry(StepClock* clock, int32_t rank, uint64_t late_ns, uint64_t submitted, bint device) noexcept nogil:
    """Note that an entry is done for which `rank` of the world was last, `late_ns` after the first rank. This rank submitted it
    at `submitted`; with `rank` -1 it was last itself.

    Of entries that overlap here only the latest counts: the rank waited for them at the same time.
    """
    if not load32_relaxed(&clock.on):
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
    clock.chain_end = now_ns()
    pthread_mutex_unlock(&clock.lock)


cdef void adopt_thread(StepClock* clock) noexcept nogil:
    """Clock the steps of the calling thread from now on."""
    clock.thread, clock.known = pthread_self(), True
    if clock.delays >= 0:
        close(clock.delays)
    clock.delays = task_times_open() if clock.reopened < MOST_THREADS else -1
    clock.reopened += clock.reopened < MOST_THREADS
    clock.inputs, clock.collecting, clock.waiting, clock.begun = 0, False, False, 0


cdef bint belongs(StepClock* clock, int optimizer) noexcept nogil:
    """Return whether steps of `optimizer` are clocked. They are those of one: of two that take turns, each has other steps."""
    if clock.optimizer != optimizer:
        clock.others += 1
        if clock.optimizer >= 0 and clock.others < MOST_OTHERS:
            return False
        clock.optimizer, clock.begun = optimizer, 0
        memset(&clock.rule, 0, sizeof(StepRule))
    clock.others = 0
    return True


cdef bint step_clock_mark(StepClock* clock, int optimizer, bint far, LateStep* late) noexcept nogil:
    """Note that the calling thread has ended a step of `optimizer`. Return whether it was late; then `late` says why."""
    cdef uint64_t now, moved
    cdef bint is_late = False
    if not load32_relaxed(&clock.on):
        return False
    pthread_mutex_lock(&clock.lock)
    if belongs(clock, optimizer):
        now = now_ns()
        if not clock.known or not pthread_equal(clock.thread, pthread_self()):
            adopt_thread(clock)
        if not read_delay(clock) and clock.delays >= 0:     # of a thread that has ended, whose place this one has
            adopt_thread(clock)
            read_delay(clock)
        clock.samples = 0
        settle(clock, now)
        clock.steps += 1
        if clock.begun:
            moved = min(clock.pending, clock.parts.ns[PART_COMPUTE])
            clock.parts.ns[PART_COMPUTE] -= moved
            clock.parts.ns[PART_CPU] += moved
            clock.parts.late_ns += clock.chain_ns
            late.number, late.begun, late.ended, late.parts = clock.steps, clock.begun, now, clock.parts
            is_late = step_rule_judge(&clock.rule, &clock.parts, far, late)
            if is_late:
                clock.kept[clock.late % LATE_KEPT] = late[0]
                clock.late += 1
        memset(&clock.parts, 0, sizeof(StepParts))
        clock.parts.late_rank = -1
        clock.samples = <uint32_t>min(age_ns(now, clock.begun) // SAMPLE_EVERY_NS, <uint64_t>STEP_SAMPLES) if clock.begun else 0
        clock.begun = clock.since = now
        clock.pending = clock.chain_ns = clock.latest_ns = 0
    pthread_mutex_unlock(&clock.lock)
    return is_late
