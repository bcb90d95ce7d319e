"""The monitor blocks in poll() on the pidfds of all other ranks and on this process's event counter, until one of them speaks or
an operation in flight, of the world or of a process set, may be overdue.

A socket's end of file does not come while a forked child of a dead rank lives, and a thread asleep on a futex cannot poll: hence
pidfds, and a thread for them (protocol, rule 2). The thread itself is Python's; it calls monitor_wait without the GIL.
"""
from libc.errno cimport EINTR, errno
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc, free

from engine_ext.control.device_watch cimport device_watch
from engine_ext.control.observers cimport observe_overdue
from engine_ext.control.stall cimport stall_watch
from engine_ext.control.state cimport EVENT_CLOSED, State
from engine_ext.platform.atomics cimport load32_acquire
from engine_ext.platform.clock cimport age_ns, patience_look
from engine_ext.platform.posix cimport pthread_mutex_lock, pthread_mutex_unlock, read
from engine_ext.shared.layout cimport CAUSE_DIED
from engine_ext.shared.segment cimport abort_world, settle_claim, wake

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
    LONGEST_MS = 3600000


cdef int look_after(State* e) noexcept nogil:
    """Look after what is in flight in this process: how long until the next look, in milliseconds."""
    cdef uint64_t seen = patience_look(e.clock)
    cdef uint64_t again = min(stall_watch(e, seen), device_watch(e, seen)), overdue = e.overdue_count
    cdef State* part
    pthread_mutex_lock(&e.lock)         # no process set ends meanwhile
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
    """Have whoever drives in this process, in the world or in a process set, look at what it is in the middle of."""
    cdef State* part
    wake(&e.segment, e.segment.rank, 0)
    pthread_mutex_lock(&e.lock)
    part = e.sets
    while part != NULL:
        wake(&part.segment, part.segment.rank, 0)
        part = part.next_set
    pthread_mutex_unlock(&e.lock)


cdef int monitor_wait(State* e) noexcept nogil:
    """Block until there is something for Python to do: a set of EVENT_*. A rank's death ends the world on the way."""
    cdef int n = e.segment.size, r
    cdef uint32_t events
    cdef uint64_t count
    cdef pollfd* fds = <pollfd*>calloc(n + 1, sizeof(pollfd))
    if fds == NULL:
        return EVENT_CLOSED
    for r in range(n):
        fds[r].fd = e.peers[r] if r != e.segment.rank else -1       # negative: poll looks past it
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
                fds[r].fd = e.peers[r] = -2 - e.peers[r]            # once; the descriptor can still be told for closing
                if load32_acquire(&e.segment.pages[r].left):        # pairs with the release in close: it said goodbye,
                    wake_drivers(e)                                 # and may have ended before it rang
                else:
                    abort_world(&e.segment, r, CAUSE_DIED, b"its process ended without a word")
                    if r == e.segment.leader:
                        settle_claim(&e.segment)                    # it would have told the coordinator's host
    free(fds)
    return <int>events
