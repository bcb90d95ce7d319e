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
from engine_ext.transport.lanes cimport lanes_answered, lanes_call

cdef enum:
    SILENCE_NS = 2000000000     # for which a process that runs may leave a call unanswered
    OTHERS_NS = 1000000000      # more, for which those who can ask others come first
    JUDGE_NS = 500000000        # more, for which rank 0 does that sees the names of all: it knows who waits for whom
    OVER_NS = 1000000000        # since the last look: whoever is blamed now is so for something else


cdef bint roll_call_open(const RollCall* roll, uint64_t seen) noexcept nogil:
    """Whether somebody waits for answers."""
    return load_relaxed(&roll.begun) != 0 and not overdue_ns(seen, load_relaxed(&roll.looked), OVER_NS)


cdef void call(RollCall* roll, Segment* world, Network* network) noexcept nogil:
    """Ask all ranks that this one can ask."""
    cdef int r
    roll.number += 1
    for r in range(world.size):
        roll.silent[r] = r != world.rank and not load32_acquire(&world.pages[r].left)
        if roll.silent[r] and nearby(world, r):
            wake(world, r, 0)
        elif roll.silent[r]:
            roll.silent[r] = lanes_call(&network.lanes, r, roll.number)


cdef bint sleeps_again(const rank_page* page) noexcept nogil:
    """Whether whoever drives has announced a sleep that nobody has ended yet: it has heard the last ring."""
    cdef uint32_t asleep = load32_acquire(&page.asleep), door = asleep & SLEEP_DOORS
    return door != 0 and (load32_acquire(&page.door[door]) ^ asleep >> SLEEP_COUNT_SHIFT) << SLEEP_COUNT_SHIFT == 0


cdef int first_silent(RollCall* roll, Segment* world, Network* network) noexcept nogil:
    """Take note of answers; the first rank that has not answered, or ALL_ANSWER."""
    cdef int first = ALL_ANSWER, r
    for r in range(world.size):
        if not roll.silent[r]:
            continue
        if load32_acquire(&world.pages[r].left):
            roll.silent[r] = False
        elif nearby(world, r):
            roll.silent[r] = not sleeps_again(world.pages[r])
        else:
            roll.silent[r] = not lanes_answered(&network.lanes, r, roll.number)
        if roll.silent[r] and first < 0:
            first = r
    return first


cdef int roll_call(RollCall* roll, Segment* world, Network* network, uint64_t seen, bint judges) noexcept nogil:
    """A rank that does not answer, ALL_ANSWER, or TOO_SOON. The first of several calls has ranks asked."""
    cdef int silent = TOO_SOON
    cdef uint64_t patience = SILENCE_NS
    if not cas32(&roll.busy, 0, 1):
        return TOO_SOON
    if not roll_call_open(roll, seen):
        call(roll, world, network)
        store_relaxed(&roll.begun, seen)
    else:
        silent = first_silent(roll, world, network)
        if silent == ALL_ANSWER:
            patience += OTHERS_NS
            if not judges:
                patience += JUDGE_NS
        if not overdue_ns(seen, load_relaxed(&roll.begun), patience):
            silent = TOO_SOON
    store_relaxed(&roll.looked, seen)
    store32_release(&roll.busy, 0)
    return silent
