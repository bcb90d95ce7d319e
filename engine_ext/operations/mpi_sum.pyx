"""An allreduce that MPI makes: one MPI_Iallreduce over all ranks for each entry, as other engines over MPI do it.

It is there to be compared with the engine's own ways, and to be chosen where an MPI knows its network better. Its sums are in an
order of its own, which depends on where an element lies in the fused buffer: so fusion changes bits. Only sums of float32 and
float64 go this way. Sums of halves would be rounded at each step, and all else is exact in any order.

The logical buffer is packed into memory of the transport as one chunk, and summed there; nothing goes through the slots. Every
rank comes to the entries that are summed in the order of the schedule, as MPI wants it.
"""
from libc.stdint cimport uint64_t

from engine_ext.data.executor cimport Steps, elements, executor_start, offset
from engine_ext.data.pieces cimport pack_range
from engine_ext.data.plan cimport Cut, cut_range, next_piece
from engine_ext.kernels.kernels cimport (
    ENGINE_AVERAGE, ENGINE_DTYPES, ENGINE_FLOAT32, ENGINE_FLOAT64, ENGINE_NO_SOURCE, ENGINE_SUM, dtype_bytes,
)
from engine_ext.operations.operation cimport chunks_of_plan
from engine_ext.shared.layout cimport ALGORITHM_MPI, BETWEEN_MPI, SLOT_BYTES, wire_dtype

cdef enum:
    LONGEST = 0x7FFFFFFF   # bytes: MPI counts elements by an int

cdef Steps STEPS = Steps(pack, finish, NULL, NULL, True, False)


cdef bint is_of(const engine_meta* meta, int dtype) noexcept nogil:
    """Whether a tensor, or all tensors of a group, travel as what they are, and that is `dtype`."""
    cdef int d
    if wire_dtype(meta.wire, dtype) != dtype:
        return False
    for d in range(ENGINE_DTYPES):
        if d != dtype and ((meta.group and meta.dims[d]) or (not meta.group and d == meta.dtype)):
            return False
    return True


cdef bint mpi_sums(const engine_meta* meta) noexcept nogil:
    """Whether MPI can sum such tensors."""
    return ((meta.op == ENGINE_SUM or meta.op == ENGINE_AVERAGE)
            and (is_of(meta, ENGINE_FLOAT32) or is_of(meta, ENGINE_FLOAT64)))


cdef bint choose_mpi_sum(engine_entry* entry, const engine_knobs* knobs, const Crews* crews) noexcept nogil:
    """Have MPI sum `entry`, if the knob says so and it can."""
    if knobs.between_hosts != BETWEEN_MPI or not crews.summing or entry.bytes >= LONGEST or not mpi_sums(&entry.meta):
        return False
    entry.algorithm, entry.chunk = ALGORITHM_MPI, SLOT_BYTES
    return True


cdef bint mpi_sum_start(Executor* x) noexcept nogil:
    """Begin the entry that the plan describes. False without memory."""
    x.chunk = x.plan.total
    if x.plan.total and x.transport.sum_room(x.transport, x.plan.total) == NULL:
        return False
    x.reduction.count, x.reduction.copies, x.reduction.unscaled = 1, 1, ENGINE_NO_SOURCE
    executor_start(x, &STEPS, chunks_of_plan(x))
    x.sums = True
    return True


cdef void pack(Executor* x, uint64_t n) noexcept nogil:
    cdef uint64_t item_bytes = <uint64_t>dtype_bytes(x.plan.pieces[0].wire)
    pack_range(x, x.transport.sum_room(x.transport, x.plan.total), 0, 0, x.plan.total)
    x.transport.sum(x.transport, (x.plan.total + item_bytes - 1) // item_bytes, <int>item_bytes)


cdef void finish(Executor* x, uint64_t n) noexcept nogil:
    """Divide and scale on the way to the tensors."""
    cdef const char* sums = x.transport.sum_room(x.transport, x.plan.total)
    cdef Cut cut = cut_range(&x.plan, 0, x.plan.total)
    while next_piece(&x.plan, &cut):
        x.sources[0] = sums + cut.low
        x.targets[0] = cut.piece.target + offset(x, cut.piece, cut.low)
        x.reduction.dtype, x.reduction.tensor = cut.piece.wire, cut.piece.dtype
        x.kernels.reduce(&x.reduction, x.sources, <void* const*>x.targets, elements(x, cut.piece, cut.high - cut.low))
