"""The one interface between the engine and its observers: flight record, timeline, counters, marks of steps.

The engine reports an event by one call here, and no observer changes what the engine does. An observer that is off costs one
branch; hooks of submissions, waits and passes are inline for that reason. Each hook names its caller and says whether the
engine's lock is held.

A new observer keeps its state in State, and adds its calls here and in observers.pyx. The coordinator knows no State: its hooks
are in lateness.pxd.
"""
from libc.stdint cimport int64_t, uint32_t, uint64_t

from engine_ext.control.overlap cimport overlap_wait_begins, overlap_wait_ends
from engine_ext.control.state cimport State
from engine_ext.control.step_clock cimport step_clock_sample, step_clock_wait
from engine_ext.control.trace cimport note_busy, trace_wait_begins, trace_wait_ends
from engine_ext.coordinator.coordinator cimport waiting
from engine_ext.gpu.device cimport device_sample
from engine_ext.hosts.connections cimport traffic_waited, traffic_waits
from engine_ext.operations.op cimport Op, fails
from engine_ext.platform.atomics cimport count_up, load32_relaxed, load_relaxed, store32_relaxed, store_relaxed
from engine_ext.platform.posix cimport pthread_mutex_lock, pthread_mutex_unlock
from engine_ext.shared.counters cimport counters_page, tally
from engine_ext.shared.layout cimport engine_entry
from engine_ext.shared.segment cimport coordinates

# ---- an engine's life: called by Engine, without the lock -------------------------------------------------------------------

cdef void observers_open(State* e, counters_page* page) noexcept nogil      # before the engine's thread is started
cdef void observers_count(State* e, counters_page* page) noexcept nogil     # while nothing is in flight
cdef void observers_name_group(State* e, const char* text, uint64_t nbytes) noexcept nogil   # for a process set
cdef void observers_leave_group(State* e) noexcept nogil                    # after its last operation
cdef void observers_forked(State* e) noexcept nogil                         # in a forked child
cdef void observers_close(State* e, bint alive) noexcept nogil              # when no thread uses it any more, or in a child

# ---- tensors on a GPU, of the world and of its process sets: called by device_entries -------------------------------------

cdef void observe_device(State* e, int ordinal) noexcept nogil                      # the device was opened
cdef void observe_handover(State* e, const engine_entry* entry) noexcept nogil      # by the driver's role, without a lock
cdef void observe_enqueued(State* world) noexcept nogil                             # an entry was enqueued; by the CUDA thread
cdef void observe_passed(State* e, uint64_t entries) noexcept nogil                 # by the CUDA thread, without the lock
cdef void observe_sample(State* e, const device_sample* sample) noexcept nogil      # likewise

# ---- an entry of the schedule: called by run_schedule, under the lock -------------------------------------------------------

cdef void observe_entry_begins(State* e, const engine_entry* entry) noexcept nogil
cdef void observe_completions(State* e, const engine_entry* entry) noexcept nogil
cdef void observe_entry_ends(State* e, const engine_entry* entry, uint64_t now) noexcept nogil

cdef inline void observe_entry_waits(State* e) noexcept nogil:
    """Note that the entry in progress waits for other ranks. Called by run_schedule without the lock, as the next hook."""
    if e.network != NULL:
        traffic_waits(&e.traffic, &e.executor, &e.segment)

cdef inline void observe_entry_looks(State* e) noexcept nogil:
    """Note that the entry in progress may be able to go on."""
    if e.network != NULL:
        traffic_waited(&e.traffic, &e.segment, e.counters_page)

cdef inline bint observes_stages(const State* e, const engine_entry* entry) noexcept nogil:
    """Return whether the timeline shows `entry` and wants the times of its stages. May be called without the lock."""
    return entry.closed != 0 and load32_relaxed(&e.trace.recording.on)

# ---- failures and stalls: called without the lock ---------------------------------------------------------------------------

cdef void observe_mismatch(State* e, bint completed) noexcept nogil                         # by report_mismatch
cdef void observe_unfinished(State* e, const Op* op, int64_t sequence) noexcept nogil       # by it and fail_everything, locked
cdef void observe_failure(State* e, uint64_t word, uint64_t completed) noexcept nogil       # by fail_everything
cdef void observe_warning(State* e) noexcept nogil                                          # by raise_warning
cdef uint64_t observe_overdue(State* e, uint64_t operations, uint64_t seen) noexcept nogil  # by the monitor thread

# ---- a step -----------------------------------------------------------------------------------------------------------------

cdef void tell_step(State* e, int source) noexcept nogil

cdef inline void observe_step(State* e, int source) noexcept nogil:
    """Note that the optimizer `source` has ended a step. Called by end_step, without the lock."""
    if load32_relaxed(&e.trace.recording.on) or e.counters_page != NULL or e.marks.ring != NULL:
        tell_step(e, source)

cdef void judge_step(State* e, int optimizer) noexcept nogil

cdef inline void observe_marked_step(State* e, int optimizer) noexcept nogil:
    """Note that the calling thread, which is the program's, has ended a step. Called by mark_step after observe_step."""
    if e.world.step_clock != NULL:
        judge_step(e, optimizer)

# ---- groups -----------------------------------------------------------------------------------------------------------------

cdef inline void tally_group(State* e, uint64_t* counts, uint64_t n) noexcept nogil:
    """Add `n` to this engine's word of `counts`, an array by place, if the engine has a place."""
    cdef uint32_t place = load32_relaxed(&e.group_place)
    if place:
        tally(&counts[place - 1], n)

# ---- submissions ------------------------------------------------------------------------------------------------------------

cdef inline void observe_submission(State* e, Op* op) noexcept nogil:
    """Note that this rank has submitted `op`, itself or as a stand-in. Called by submit, backlog_submit and collect_batch, under
    the lock."""
    if e.network != NULL:
        op.unblocked = load_relaxed(&e.world.unblocked)
    if e.counters_page != NULL and not fails(op):
        tally(e.counters_page.submitted, 1)
        tally_group(e, e.counters_page.group_submitted, 1)
        if op.requested:
            tally(e.counters_page.requests, 1)

# ---- waits ------------------------------------------------------------------------------------------------------------------

cdef inline bint observes_waits(const State* e) noexcept nogil:
    """Return whether an observer wants waits to be noted."""
    return load32_relaxed(&e.trace.recording.on) or e.counters_page != NULL

cdef inline void observe_call_nears(const State* e) noexcept nogil:
    """Let observers read before the lock what takes a system call. Called by driver_call without the lock."""
    if e.counters_page != NULL and e.world.step_clock != NULL:
        step_clock_sample(e.world.step_clock)

cdef inline uint32_t observe_call_begins(State* e, uint64_t now) noexcept nogil:
    """Note that a caller submits and waits, since `now`. Return the value that observe_wait_ends needs. Called by submit under
    the lock."""
    if not observes_waits(e):
        return 0
    if e.counters_page != NULL:
        overlap_wait_begins(&e.overlap, now)
        if e.world.step_clock != NULL:
            step_clock_wait(e.world.step_clock, True, now)
    return trace_wait_begins(&e.trace, now)

cdef inline uint32_t observe_wait_begins(State* e, uint64_t now) noexcept nogil:
    """Like observe_call_begins, for a caller that has submitted before. Called by driver_wait without the lock."""
    cdef uint32_t recording = 0
    if observes_waits(e):
        observe_call_nears(e)
        pthread_mutex_lock(&e.lock)
        recording = observe_call_begins(e, now)
        pthread_mutex_unlock(&e.lock)
    return recording

cdef inline void observe_wait_ends(State* e, uint32_t recording, uint64_t begun, uint64_t now) noexcept nogil:
    """Note that a caller's wait since `begun` is over. `recording`: returned at its start. Called by driver_call and driver_wait
    without the lock."""
    count_up(&e.counters.wait_ns, now - begun)
    store_relaxed(&e.world.unblocked, now)
    if recording or e.counters_page != NULL:
        observe_call_nears(e)
        pthread_mutex_lock(&e.lock)
        if recording:
            trace_wait_ends(&e.trace, recording, now)
        if e.counters_page != NULL:
            tally(e.counters_page.blocked_ns, overlap_wait_ends(&e.overlap, now))
            if e.world.step_clock != NULL:
                step_clock_wait(e.world.step_clock, False, now)
        pthread_mutex_unlock(&e.lock)

# ---- the driver: called by the role's holder, without the lock --------------------------------------------------------------

cdef inline bint something_ready(const State* e) noexcept nogil:
    """Return whether some tensor that all ranks have submitted is not done. Called on rank 0."""
    return waiting(&e.coordinator) != 0 or load_relaxed(&e.segment.mine.cursor) != e.coordinator.writer.tail

cdef inline void observe_readiness(State* e) noexcept nogil:
    """Note whether any tensor is ready on all ranks and not done. Called by drive_once, on every rank."""
    if load32_relaxed(&e.marks.timed) and coordinates(&e.segment):
        note_busy(&e.marks, something_ready(e))

cdef inline void observe_yield(State* e) noexcept nogil:
    """Count that a caller yields the processor."""
    count_up(&e.counters.yields, 1)
    if e.world.step_clock != NULL:
        store32_relaxed(&e.world.step_clock.yielded, 1)

cdef inline void observe_sleep(State* e) noexcept nogil:
    """Count that a caller with the role sleeps."""
    count_up(&e.counters.sleeps, 1)

cdef inline void observe_late_wake(State* e) noexcept nogil:
    """Count a sleep that ended by its timeout although there was something to do."""
    count_up(&e.counters.late, 1)
