"""The data plane's state machine (ARCHITECTURE.md, "A data-plane entry").

Chunk numbers count over the whole schedule, so that the words `packed`, `reduced` and `copied` of a rank say how many chunks
it has passed at each stage, whatever the entry. A stage that has nothing to do is passed all the same.
"""
from libc.stdint cimport uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from engine_ext.control.table cimport Status
from engine_ext.data.plan cimport plan_free
from engine_ext.data.stages cimport copy_chunk, pack_chunk, reduce_chunk
from engine_ext.platform.atomics cimport (
    FENCE_STAGE, full_fence, load32_relaxed, load_acquire, load_relaxed, now_ns, store_relaxed, store_release,
)
from engine_ext.platform.clock cimport age_ns, patience, patience_at
from engine_ext.shared.layout cimport (
    ALGORITHM_ONE_SHOT, ALGORITHM_SHARED, KIND_ALLREDUCE, KIND_REDUCESCATTER, SLEEP_IN_ENTRY, SLOTS, rank_page,
)
from engine_ext.shared.segment cimport ring_unfenced

cdef enum Stage:
    PACKED = 0
    REDUCED = 1
    COPIED = 2

cdef uint64_t NOTHING = <uint64_t>-1


cdef int executor_open(Executor* x, Segment* segment, Arena* arena, const engine_kernels* kernels,
                       const patience* clock) noexcept nogil:
    memset(x, 0, sizeof(Executor))
    x.segment, x.arena, x.kernels, x.clock = segment, arena, kernels, clock
    x.progressed = patience_at(clock, now_ns())
    x.sources = <const void**>calloc(segment.size, sizeof(void*))
    x.targets = <void**>calloc(segment.size, sizeof(void*))
    x.gather_bytes = <uint64_t*>calloc(segment.size, 8)
    x.gather_start = <uint64_t*>calloc(segment.size, 8)
    x.send_bytes = <uint64_t*>calloc(segment.size, 8)
    x.send_start = <uint64_t*>calloc(segment.size, 8)
    if (x.sources == NULL or x.targets == NULL or x.gather_bytes == NULL or x.gather_start == NULL or x.send_bytes == NULL
            or x.send_start == NULL):
        return Status.NO_MEMORY
    return Status.OK


cdef void executor_close(Executor* x) noexcept nogil:
    plan_free(&x.plan)
    free(<void*>x.sources)
    free(x.targets)
    free(x.gather_bytes)
    free(x.gather_start)
    free(x.send_bytes)
    free(x.send_start)
    free(x.received)
    free(x.adasum.memory)
    memset(x, 0, sizeof(Executor))


cdef void executor_start(Executor* x, uint64_t chunks) noexcept nogil:
    """Begin the entry that the fields and the plan describe."""
    x.first = x.packed
    x.end = x.first + chunks
    x.uncopied = x.end if x.algorithm == ALGORITHM_ONE_SHOT or x.kind == KIND_REDUCESCATTER else 0
    x.pack_gate = x.reduce_gate = 0
    x.active = True
    x.progressed = patience_at(x.clock, now_ns())
    if x.timed:
        memset(x.stage_first, 0, sizeof(x.stage_first))
        memset(x.stage_last, 0, sizeof(x.stage_last))
        memset(x.stage_spent, 0, sizeof(x.stage_spent))


cdef bint reached(Executor* x, Stage stage, uint64_t chunks) noexcept nogil:
    """Whether every rank has passed `stage` for that many chunks."""
    cdef uint64_t least, passed
    cdef rank_page* page
    cdef int r
    if x.known[<int>stage] >= chunks:
        return True
    least = <uint64_t>-1
    for r in range(x.segment.size):
        page = x.segment.pages[r]
        passed = load_acquire(&page.packed + <int>stage)     # pairs with publish(): that rank's reads and writes are done
        if passed < least:
            least = passed
    x.known[<int>stage] = least
    return least >= chunks


cdef void publish(Executor* x) noexcept nogil:
    """Say how far this rank is; release: what it wrote to its slot, or read from others', comes first."""
    cdef rank_page* mine = x.segment.mine
    cdef rank_page* page
    cdef int r
    store_release(&mine.packed, x.packed)
    store_release(&mine.reduced, x.reduced)
    store_release(&mine.copied, x.copied)
    full_fence(FENCE_STAGE)                            # pairs with the fence after `asleep` is announced (I8)
    for r in range(x.segment.size):
        page = x.segment.pages[r]
        if r != x.segment.rank and load32_relaxed(&page.asleep) & SLEEP_IN_ENTRY and (
                x.packed >= load_relaxed(&page.need[<int>Stage.PACKED])
                or x.reduced >= load_relaxed(&page.need[<int>Stage.REDUCED])
                or x.copied >= load_relaxed(&page.need[<int>Stage.COPIED])):
            ring_unfenced(x.segment, r, SLEEP_IN_ENTRY)


cdef inline bint may_pack(const Executor* x) noexcept nogil:
    return x.packed < x.end and (x.packed < x.pack_gate or x.reduced >= x.pack_gate)


cdef inline bint may_reduce(const Executor* x) noexcept nogil:
    return x.reduced < x.packed and (x.reduced < x.reduce_gate or x.copied >= x.reduce_gate)


cdef void executor_needs(Executor* x, uint64_t* need) noexcept nogil:
    """What other ranks have to reach before step() can do anything: the conditions there, turned round."""
    cdef bint needs_packed = x.algorithm != ALGORITHM_SHARED or x.needs_pack
    store_relaxed(&need[<int>Stage.PACKED], x.reduced + 1 if may_reduce(x) and needs_packed else NOTHING)
    store_relaxed(&need[<int>Stage.REDUCED], x.copied + 1 if x.copied < x.reduced else NOTHING)
    store_relaxed(&need[<int>Stage.COPIED], x.packed + 1 - SLOTS if may_pack(x) and x.packed >= SLOTS else NOTHING)


cdef void pass_chunk(Executor* x, Stage stage, uint64_t chunk) noexcept nogil:
    """Take one chunk of the entry through one stage."""
    cdef uint64_t begun = now_ns() if x.timed else 0
    if stage == Stage.PACKED:
        pack_chunk(x, chunk)
    elif stage == Stage.REDUCED:
        reduce_chunk(x, chunk)
    else:
        copy_chunk(x, chunk)
    if x.timed:
        if x.stage_first[<int>stage] == 0:
            x.stage_first[<int>stage] = begun
        x.stage_last[<int>stage] = now_ns()
        x.stage_spent[<int>stage] += age_ns(x.stage_last[<int>stage], begun)


cdef bint step(Executor* x) noexcept nogil:
    """Pass one stage of one chunk, the latest stage first, so that few chunks are on the way at once."""
    if x.copied < x.reduced:
        if x.kind != KIND_ALLREDUCE or reached(x, Stage.REDUCED, x.copied + 1):
            pass_chunk(x, Stage.COPIED, x.copied - x.first)
            x.copied += 1
            return True
    if may_reduce(x):
        if (x.algorithm == ALGORITHM_SHARED and not x.needs_pack) or reached(x, Stage.PACKED, x.reduced + 1):
            if x.kind == KIND_ALLREDUCE or x.kind == KIND_REDUCESCATTER:
                pass_chunk(x, Stage.REDUCED, x.reduced - x.first)
                if x.reduced < x.uncopied:
                    x.copied += 1
            x.reduced += 1
            return True
    if may_pack(x):
        if x.algorithm == ALGORITHM_SHARED or x.packed < SLOTS or reached(x, Stage.COPIED, x.packed + 1 - SLOTS):
            pass_chunk(x, Stage.PACKED, x.packed - x.first)
            x.packed += 1
            return True
    return False


cdef bint executor_progress(Executor* x) noexcept nogil:
    """Pass every stage that can be passed now; whether any was. Clears `active` when the entry is done on this rank."""
    cdef bint moved = False
    while x.active:
        if x.copied == x.end:
            x.active = False
            break
        if not step(x):
            break
        publish(x)
        moved = True
    if moved:
        x.progressed = patience_at(x.clock, now_ns())
    return moved


cdef int executor_laggard(Executor* x) noexcept nogil:
    """The rank that has passed least of the entry in progress, itself excepted."""
    cdef rank_page* page
    cdef uint64_t passed, least = <uint64_t>-1
    cdef int r, slowest = -1
    for r in range(x.segment.size):
        page = x.segment.pages[r]
        passed = load_acquire(&page.packed) + load_acquire(&page.reduced) + load_acquire(&page.copied)
        if r != x.segment.rank and passed < least:
            slowest, least = r, passed
    return slowest
