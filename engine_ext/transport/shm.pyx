"""The transport of ranks on one host (transport.pxd says what it promises).

A slot is written by its owner and read in place, so nothing is sent. A rank's progress is three words of its page.
"""
from libc.stdint cimport uint64_t
from libc.string cimport memset

from engine_ext.platform.atomics cimport (
    FENCE_STAGE, full_fence, load32_relaxed, load_acquire, load_relaxed, store_relaxed, store_release,
)
from engine_ext.shared.layout cimport SLEEP_IN_ENTRY, rank_page, segment_slot
from engine_ext.shared.segment cimport Segment, wake_unfenced
from engine_ext.transport.transport cimport Progress, Stage, Transport


cdef Transport* shared_memory_open(SharedMemory* t, Segment* segment) noexcept nogil:
    """Fill in a transport over a mapped segment, which the caller owns."""
    memset(t, 0, sizeof(SharedMemory))      # functions that are not set below stay NULL: this transport has none
    t.segment = segment
    t.functions.slot, t.functions.publish, t.functions.all_ranks_reached = slot, publish, all_ranks_reached
    t.functions.needs, t.functions.progress = needs, progress
    return &t.functions


cdef inline Segment* segment_of(Transport* t) noexcept nogil:
    return (<SharedMemory*>t).segment


cdef char* slot(Transport* t, int rank, uint64_t n) noexcept nogil:
    """Return the address of the slot of `rank` for chunk `n`. Other ranks' slots are read only."""
    return segment_slot(segment_of(t).header, rank, n)


cdef void publish(Transport* t, const Progress* mine) noexcept nogil:
    """Publish this rank's progress, and wake the ranks whose needs it meets."""
    shared_memory_publish(segment_of(t), segment_of(t).rank, mine)


cdef void shared_memory_publish(Segment* segment, int rank, const Progress* passed) noexcept nogil:
    """Store the progress of `rank`, and wake the ranks of this host whose needs it meets.

    The stores release the rank's writes to its slot, and its reads of others' slots. They pair with all_ranks_reached().
    """
    cdef rank_page* page = segment.pages[rank]
    cdef int i
    store_release(&page.packed, passed.packed)
    store_release(&page.reduced, passed.reduced)
    store_release(&page.copied, passed.copied)
    full_fence(FENCE_STAGE)                            # pairs with the sleeper's fence after it announces `asleep` (I8)
    for i in range(segment.crew_size):
        page = segment.pages[segment.crew[i]]
        if segment.crew[i] != rank and load32_relaxed(&page.asleep) & SLEEP_IN_ENTRY and (
                passed.packed >= load_relaxed(&page.need[<int>Stage.PACKED])
                or passed.reduced >= load_relaxed(&page.need[<int>Stage.REDUCED])
                or passed.copied >= load_relaxed(&page.need[<int>Stage.COPIED])):
            wake_unfenced(segment, segment.crew[i], SLEEP_IN_ENTRY)


cdef bint all_ranks_reached(Transport* t, Stage stage, uint64_t chunks) noexcept nogil:
    """Return whether every rank, this one included, has passed `stage` for `chunks` chunks."""
    cdef Segment* segment = segment_of(t)
    cdef uint64_t* known = &(<SharedMemory*>t).known[<int>stage]
    cdef uint64_t least, passed
    cdef int r
    if known[0] >= chunks:
        return True
    least = <uint64_t>-1
    for r in range(segment.size):
        passed = load_acquire(&segment.pages[r].packed + <int>stage)    # pairs with shared_memory_publish
        if passed < least:
            least = passed
    known[0] = least
    return least >= chunks


cdef void needs(Transport* t, const Progress* others) noexcept nogil:
    """Store the progress of others for which this rank waits, before it sleeps; UINT64_MAX: it does not wait for that stage."""
    cdef uint64_t* need = segment_of(t).mine.need
    store_relaxed(&need[<int>Stage.PACKED], others.packed)
    store_relaxed(&need[<int>Stage.REDUCED], others.reduced)
    store_relaxed(&need[<int>Stage.COPIED], others.copied)


cdef Progress progress(Transport* t, int rank) noexcept nogil:
    """Return the progress that `rank` has published."""
    cdef const rank_page* page = segment_of(t).pages[rank]
    cdef Progress passed
    passed.packed, passed.reduced = load_acquire(&page.packed), load_acquire(&page.reduced)
    passed.copied = load_acquire(&page.copied)
    return passed
