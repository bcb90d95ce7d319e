"""Which ranks answer at all, when some rank of a job on several hosts is to be blamed for standing still.

News of a rank on another host come through the processes of others: whoever carries for it, and the leaders. When one of these
is stopped, those behind it seem to stand still as well, and look as if they were to blame. So whoever is about to blame a rank
first has those answer that it can ask by itself: the ranks of its own host, whose drivers wake and go to sleep again when their
doors are rung, and the ranks that it has lanes with, whose network threads answer. A process that is stopped does neither.

Who has not answered for a while is the one to name. If all answer, others may still know of one that this rank cannot ask, and
have a moment to say so.
"""
from libc.stdint cimport uint32_t, uint64_t

from engine_ext.platform.atomics cimport cas32, load32_acquire, load_relaxed, store32_release, store_relaxed
from engine_ext.platform.clock cimport overdue_ns
from engine_ext.shared.layout cimport SLEEP_COUNT_SHIFT, SLEEP_DOORS, rank_page
from engine_ext.shared.segment cimport nearby, wake
from engine_ext.transport.lanes cimport lanes_answered, lanes_ping

cdef enum:
    SILENCE_NS = 2000000000     # for which a process that runs may leave a ping unanswered
    OTHERS_NS = 1000000000      # more, for which those who can ask others come first
    JUDGE_NS = 500000000        # more, for which rank 0 does that sees the names of all: it knows who waits for whom
    OVER_NS = 1000000000        # since the last look: whoever is blamed now is so for something else


cdef bint liveness_is_checked(const Liveness* probe, uint64_t seen) noexcept nogil:
    """Whether somebody waits for answers."""
    return load_relaxed(&probe.begun) != 0 and not overdue_ns(seen, load_relaxed(&probe.looked), OVER_NS)


cdef void ping_ranks(Liveness* probe, Segment* world, Network* network) noexcept nogil:
    """Ask all ranks that this one can ask."""
    cdef int r
    probe.number += 1
    for r in range(world.size):
        probe.silent[r] = r != world.rank and not load32_acquire(&world.pages[r].left)
        if probe.silent[r] and nearby(world, r):
            wake(world, r, 0)
        elif probe.silent[r]:
            probe.silent[r] = lanes_ping(&network.lanes, r, probe.number)


cdef bint sleeps_again(const rank_page* page) noexcept nogil:
    """Whether whoever drives has announced a sleep that nobody has ended yet: it has heard the last ring."""
    cdef uint32_t asleep = load32_acquire(&page.asleep), door = asleep & SLEEP_DOORS
    return door != 0 and (load32_acquire(&page.door[door]) ^ asleep >> SLEEP_COUNT_SHIFT) << SLEEP_COUNT_SHIFT == 0


cdef int first_silent(Liveness* probe, Segment* world, Network* network) noexcept nogil:
    """Take note of answers; the first rank that has not answered, or ALL_ANSWER."""
    cdef int first = ALL_ANSWER, r
    for r in range(world.size):
        if not probe.silent[r]:
            continue
        if load32_acquire(&world.pages[r].left):
            probe.silent[r] = False
        elif nearby(world, r):
            probe.silent[r] = not sleeps_again(world.pages[r])
        else:
            probe.silent[r] = not lanes_answered(&network.lanes, r, probe.number)
        if probe.silent[r] and first < 0:
            first = r
    return first


cdef int find_silent_rank(Liveness* probe, Segment* world, Network* network, uint64_t seen, bint judges) noexcept nogil:
    """A rank that does not answer, ALL_ANSWER, or TOO_SOON. The first of several looks pings them."""
    cdef int silent = TOO_SOON
    cdef uint64_t patience = SILENCE_NS
    if not cas32(&probe.busy, 0, 1):
        return TOO_SOON
    if not liveness_is_checked(probe, seen):
        ping_ranks(probe, world, network)
        store_relaxed(&probe.begun, seen)
    else:
        silent = first_silent(probe, world, network)
        if silent == ALL_ANSWER:
            patience += OTHERS_NS
            if not judges:
                patience += JUDGE_NS
        if not overdue_ns(seen, load_relaxed(&probe.begun), patience):
            silent = TOO_SOON
    store_relaxed(&probe.looked, seen)
    store32_release(&probe.busy, 0)
    return silent
