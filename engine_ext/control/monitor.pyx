"""The monitor thread's wait: poll() on the pidfds of all other ranks and on this process's eventfd, until one is readable or an
operation in flight, of the world or of a process set, may be overdue.

A socket's end of file does not come while a forked child of a dead rank lives, and a thread asleep on a futex cannot poll: hence
pidfds, and a thread for them (protocol, rule 2). The thread itself is Python's; it calls monitor_wait without the GIL.
"""
from libc.errno cimport EINTR, errno
from libc.stdint cimport uint32_t
from libc.stdio cimport snprintf
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

from engine_ext.control.observers cimport observe_overdue
from engine_ext.control.stall cimport stall_accuse, add_stall_line, stall_watch
from engine_ext.control.state cimport EVENT_CLOSED
from engine_ext.control.turns cimport turns_are_late
from engine_ext.gpu.device cimport DEVICE_NAME, DEVICE_OUTSTANDING, device
from engine_ext.platform.atomics cimport load32_acquire, load32_relaxed, load_acquire, load_pointer
from engine_ext.platform.clock cimport after_ns, age_ns, overdue_ns, patience_look
from engine_ext.platform.posix cimport pthread_mutex_lock, pthread_mutex_unlock, read
from engine_ext.shared.layout cimport CAUSE_DIED, COORDINATOR
from engine_ext.shared.segment cimport abort_world, claimed, settle_claim, wake

cdef extern from "<poll.h>" nogil:
    cdef struct pollfd:
        int fd
        short events
        short revents
    enum: POLLIN
    int poll(pollfd* fds, unsigned long count, int timeout)

cdef extern from * nogil:
    """
    static inline uint32_t take32(uint32_t *p) { return __atomic_exchange_n(p, 0, __ATOMIC_ACQ_REL); }
    """
    uint32_t take32(uint32_t* p)


cdef enum:
    LONGEST_MS = 3600000    # longest timeout of one poll, in milliseconds


cdef int look_after(State* e) noexcept nogil:
    """Watch the operations in flight in this process. Return the milliseconds until the next look."""
    cdef uint64_t seen = patience_look(e.clock)
    cdef uint64_t again = min(stall_watch(e, seen), device_watch(e, seen)), overdue = e.overdue_count
    cdef State* part
    pthread_mutex_lock(&e.lock)         # held so that no process set ends meanwhile
    part = e.sets
    while part != NULL:
        again = min(again, stall_watch(part, seen))
        overdue += part.overdue_count
        part = part.next_set
    pthread_mutex_unlock(&e.lock)
    again = age_ns(min(again, observe_overdue(e, overdue, seen)), seen)
    if e.look_ns:
        again = min(again, e.look_ns)
    return <int>min(again // 1000000 + 1, <uint64_t>LONGEST_MS)


cdef void wake_drivers(State* e) noexcept nogil:
    """Wake the drivers in this process, of the world and its process sets, so that they look at their entries in progress."""
    cdef State* part
    wake(&e.segment, e.segment.rank, 0)
    pthread_mutex_lock(&e.lock)
    part = e.sets
    while part != NULL:
        wake(&part.segment, part.segment.rank, 0)
        part = part.next_set
    pthread_mutex_unlock(&e.lock)


cdef int monitor_wait(State* e) noexcept nogil:
    """Block until Python has something to do: return a set of EVENT_*. A rank that dies ends the world on the way."""
    cdef int n = e.segment.size, r
    cdef uint32_t events
    cdef uint64_t count
    cdef pollfd* fds = <pollfd*>calloc(n + 1, sizeof(pollfd))
    if fds == NULL:
        return EVENT_CLOSED
    for r in range(n):
        fds[r].fd = e.peers[r] if r != e.segment.rank else -1       # poll ignores negative descriptors
        fds[r].events = POLLIN
    fds[n].fd, fds[n].events = e.events_fd, POLLIN
    while True:
        events = take32(&e.events)
        if events:
            break
        if poll(fds, n + 1, look_after(e)) < 0:
            if errno != EINTR:
                events = EVENT_CLOSED
                break
            continue
        if fds[n].revents:
            read(e.events_fd, &count, 8)
        for r in range(n):
            if fds[r].fd >= 0 and fds[r].revents:
                fds[r].fd = e.peers[r] = -2 - e.peers[r]            # once; the value still tells the descriptor to close
                if load32_acquire(&e.segment.pages[r].left):        # pairs with the release in close: it left, and
                    wake_drivers(e)                                 # it may have ended before it rang
                else:
                    abort_world(&e.segment, r, CAUSE_DIED, b"its process ended without a word")
                    if r == e.segment.leader:
                        settle_claim(&e.segment)                    # it would have sent the claim to the coordinator's host
    free(fds)
    return <int>events


# ---- GPUs -------------------------------------------------------------------------------------------------------------------

# Work that was given to a GPU and does not end.
#
# It may wait for what the program computes before it, here or on another rank, as an operation waits for a late rank. So the same
# limits hold. A rank whose own GPU has not come to the work is late, and accuses itself. The GPUs of the other ranks wait for it
# in NCCL; their ranks accuse only when no other rank has.

cdef enum:
    TEXT_BYTES = 320

cdef uint64_t NEVER = <uint64_t>-1       # as this process sees time pass: no look is due. The NEVER of driver.pxd is 0
cdef uint64_t AGAIN_NS = 100000000       # between two attempts to accuse
cdef uint64_t GRACE_NS = 10000000000     # time for the late rank to accuse itself: between hosts that comes after pings


cdef void describe_stall(State* e, const char* whose, uint64_t ticket, uint64_t ns, bint begun, char* text) noexcept nogil:
    """Write what a GPU has not done for `ns`, and why that may be. `whose`: "its" or "this rank's"."""
    cdef char[DEVICE_NAME] name
    pthread_mutex_lock(&e.lock)
    memcpy(name, e.device.names[(ticket - 1) % DEVICE_OUTSTANDING], DEVICE_NAME)
    pthread_mutex_unlock(&e.lock)
    snprintf(text, TEXT_BYTES, "%s GPU has not %s %s for %.1f s: %s", whose,
             <const char*>b"ended" if begun else <const char*>b"begun", <const char*>name, <double>ns / 1e9,
             <const char*>b"NCCL waits there for another rank's GPU, or for the network" if begun else
             <const char*>b"what the program computes before it goes on, or hangs")


cdef void watch_turns(State* e, uint64_t seen) noexcept nogil:
    """End the world if its coordinator gives process sets no turns. An entry of host memory may hold it up; other
    checks report that, and earlier."""
    cdef char[TEXT_BYTES] text
    cdef uint64_t limit = after_ns(e.stall_limit_ns, GRACE_NS)
    if e.stall_limit_ns and turns_are_late(e, seen, limit):
        snprintf(text, TEXT_BYTES, "it has given process sets no turn on the GPUs for %.0f s", <double>limit / 1e9)
        stall_accuse(e, COORDINATOR, text, False)


cdef uint64_t device_watch(State* e, uint64_t seen) noexcept nogil:
    """Check whether the GPU goes on: warn if it does not, and end the world when the stall limit is over. Return when to look
    again, as this process sees time pass; NEVER (2^64 - 1): no look is due."""
    cdef char[TEXT_BYTES] text
    cdef device* d = <device*>load_pointer(<void**>&e.device)       # pairs with use_device
    cdef uint64_t passed, limit = e.stall_limit_ns
    cdef bint begun
    if d == NULL or load32_relaxed(&e.failed) or claimed(&e.segment):
        return NEVER
    watch_turns(e, seen)
    passed = load_acquire(&d.passed)                # pairs with cuda_thread_look, as the next two
    if passed >= load_acquire(&d.enqueued):
        e.device_since = 0
        return NEVER
    if e.device_since == 0 or passed != e.device_passed:
        e.device_since, e.device_passed = seen, passed
    begun = load_acquire(&d.begun) > passed
    if overdue_ns(seen, e.device_since, e.stall_warning_ns) and e.device_warned != passed + 1:
        e.device_warned = passed + 1
        describe_stall(e, b"this rank's", passed + 1, age_ns(seen, e.device_since), begun, text)
        add_stall_line(e, text)
    if begun and limit:
        limit = after_ns(after_ns(limit, e.look_ns), GRACE_NS)
    if overdue_ns(seen, e.device_since, limit):
        describe_stall(e, b"its", passed + 1, age_ns(seen, e.device_since), begun, text)
        stall_accuse(e, e.segment.rank, text, False)
    return max(after_ns(e.device_since, limit), after_ns(seen, AGAIN_NS)) if limit else NEVER
