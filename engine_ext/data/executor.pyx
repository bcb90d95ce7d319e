"""The data plane's state machine (docs/architecture/protocol.md, "A data-plane entry").

Chunk numbers count over the whole schedule, so that the words `packed`, `reduced` and `copied` of a rank say how many chunks
it has passed at each stage, whatever the entry. A stage that has nothing to do is passed all the same.
"""
from libc.stdint cimport UINT64_MAX, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from engine_ext.data.plan cimport plan_free
from engine_ext.platform.atomics cimport now_ns, store_relaxed
from engine_ext.platform.clock cimport age_ns, patience, patience_at
from engine_ext.shared.layout cimport SLOTS, Status
from engine_ext.transport.transport cimport Progress


cdef int executor_open(Executor* x, int rank, const Crews* crews, Transport* transport, Arena* arena,
                       const engine_kernels* kernels, const patience* clock) noexcept nogil:
    cdef int size = crews.size
    memset(x, 0, sizeof(Executor))
    x.rank, x.size, x.crews, x.transport, x.arena, x.kernels, x.clock = rank, size, crews, transport, arena, kernels, clock
    store_relaxed(&x.progressed, patience_at(clock, now_ns()))
    x.slots = <char**>calloc(size, sizeof(char*))
    x.sources = <const void**>calloc(size, sizeof(void*))
    x.targets = <void**>calloc(size, sizeof(void*))
    x.gather_bytes = <uint64_t*>calloc(size, 8)
    x.gather_start = <uint64_t*>calloc(size, 8)
    x.send_bytes = <uint64_t*>calloc(size, 8)
    x.send_start = <uint64_t*>calloc(size, 8)
    if (x.slots == NULL or x.sources == NULL or x.targets == NULL or x.gather_bytes == NULL or x.gather_start == NULL
            or x.send_bytes == NULL or x.send_start == NULL):
        return Status.NO_MEMORY
    return Status.OK


cdef void executor_close(Executor* x) noexcept nogil:
    plan_free(&x.plan)
    free(x.slots)
    free(<void*>x.sources)
    free(x.targets)
    free(x.gather_bytes)
    free(x.gather_start)
    free(x.send_bytes)
    free(x.send_start)
    free(x.received)
    free(x.adasum.memory)
    memset(x, 0, sizeof(Executor))


cdef void executor_start(Executor* x, const Steps* steps, uint64_t chunks) noexcept nogil:
    """Begin the entry that the fields and the plan describe."""
    x.steps = steps
    x.first = x.passed.packed
    x.end = x.first + chunks
    x.uncopied = x.end if steps.copy == NULL else 0
    x.pack_gate = x.reduce_gate = 0
    x.reduce_lag = SLOTS            # which holds anyway, by what is packed
    x.sums = False
    x.culprit = -1
    x.active = True
    store_relaxed(&x.progressed, patience_at(x.clock, now_ns()))
    if x.timed:
        memset(x.stage_first, 0, sizeof(x.stage_first))
        memset(x.stage_last, 0, sizeof(x.stage_last))
        memset(x.stage_spent, 0, sizeof(x.stage_spent))


cdef inline bint may_pack(const Executor* x) noexcept nogil:
    return x.passed.packed < x.end and (x.passed.packed < x.pack_gate or x.passed.reduced >= x.pack_gate)


cdef inline bint may_reduce(const Executor* x) noexcept nogil:
    return (x.passed.reduced < x.passed.packed and x.passed.reduced < x.passed.copied + x.reduce_lag
            and (x.passed.reduced < x.reduce_gate or x.passed.copied >= x.reduce_gate))


cdef void executor_needs(Executor* x) noexcept nogil:
    """Say what other ranks have to reach before step() can do anything: the conditions there, turned round."""
    cdef bint needs_packed = not x.sums and (not x.steps.in_place or x.needs_pack)
    cdef Progress others
    others.packed = x.passed.reduced + 1 if may_reduce(x) and needs_packed else UINT64_MAX
    others.reduced = x.passed.copied + 1 if x.passed.copied < x.passed.reduced else UINT64_MAX
    others.copied = x.passed.packed + 1 - SLOTS if may_pack(x) and x.passed.packed >= SLOTS else UINT64_MAX
    x.transport.needs(x.transport, &others)


cdef void pass_chunk(Executor* x, Stage stage, uint64_t chunk) noexcept nogil:
    """Take one chunk of the entry through one stage."""
    cdef uint64_t begun = now_ns() if x.timed else 0
    if stage == Stage.PACKED:
        x.steps.pack(x, chunk)
    elif stage == Stage.REDUCED:
        x.steps.reduce(x, chunk)
    else:
        x.steps.copy(x, chunk)
    if x.transport.offer != NULL and x.steps.offer != NULL:
        x.steps.offer(x, stage, chunk)
    if x.timed:
        if x.stage_first[<int>stage] == 0:
            x.stage_first[<int>stage] = begun
        x.stage_last[<int>stage] = now_ns()
        x.stage_spent[<int>stage] += age_ns(x.stage_last[<int>stage], begun)


cdef inline bint reached(Executor* x, Stage stage, uint64_t chunks) noexcept nogil:
    return x.transport.reached(x.transport, stage, chunks)


cdef inline bint may_take(Executor* x) noexcept nogil:
    """Whether what the next chunk is reduced from is there."""
    if x.sums:
        return x.transport.summed(x.transport)
    return (x.steps.in_place and not x.needs_pack) or reached(x, Stage.PACKED, x.passed.reduced + 1)


cdef bint step(Executor* x) noexcept nogil:
    """Pass one stage of one chunk, the latest stage first, so that few chunks are on the way at once."""
    if x.passed.copied < x.passed.reduced:
        if not x.steps.copies_results or reached(x, Stage.REDUCED, x.passed.copied + 1):
            pass_chunk(x, Stage.COPIED, x.passed.copied - x.first)
            x.passed.copied += 1
            return True
    if may_reduce(x):
        if may_take(x):
            if x.steps.reduce != NULL:
                pass_chunk(x, Stage.REDUCED, x.passed.reduced - x.first)
            if x.passed.reduced < x.uncopied:
                x.passed.copied += 1
            x.passed.reduced += 1
            return True
    if may_pack(x):
        if x.steps.in_place or x.passed.packed < SLOTS or reached(x, Stage.COPIED, x.passed.packed + 1 - SLOTS):
            pass_chunk(x, Stage.PACKED, x.passed.packed - x.first)
            x.passed.packed += 1
            return True
    return False


cdef bint executor_progress(Executor* x) noexcept nogil:
    """Pass every stage that can be passed now; whether any was. Clears `active` when the entry is done on this rank."""
    cdef bint moved = False
    while x.active:
        if x.passed.copied == x.end:
            x.active = False
            break
        if not step(x):
            break
        x.transport.publish(x.transport, &x.passed)
        moved = True
    if moved:
        store_relaxed(&x.progressed, patience_at(x.clock, now_ns()))
    return moved


cdef int executor_laggard(Executor* x, bint elsewhere) noexcept nogil:
    """The other rank that has passed least of the entry in progress, as far as it is known here; -1: there is no other. Of equals
    it is the lowest; with `elsewhere`, one on another host, if there is."""
    cdef Progress passed
    cdef uint64_t total, least = 0
    cdef int here = x.crews.host_of[x.rank], slowest = -1, r
    for r in range(x.size):
        if r == x.rank:
            continue
        passed = x.transport.progress(x.transport, r)
        total = passed.packed + passed.reduced + passed.copied
        if slowest < 0 or total < least or (elsewhere and total == least and x.crews.host_of[slowest] == here):
            slowest, least = r, total
    return slowest


cdef bint executor_passed_by(Executor* x, int rank) noexcept nogil:
    """Whether `rank` is done with the entry in progress."""
    return x.transport.progress(x.transport, rank).copied >= x.end
