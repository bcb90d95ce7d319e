"""Functions that rows of the table share: the beginning of an entry, sizes, chunks, and the plan of fused tensors."""
from cpython.object cimport PyObject
from cpython.ref cimport Py_XDECREF
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memset

from engine_ext.data.executor cimport Piece, Plan, plan_add, plan_append, plan_clear
from engine_ext.kernels.kernels cimport ENGINE_AVERAGE, ENGINE_DTYPES, ENGINE_UINT8, dtype_bytes
from engine_ext.operations.op cimport OP_DONE, Member
from engine_ext.shared.layout cimport (
    ALGORITHM_SCATTER, ALGORITHM_TWO_SHOT, ENTRY_NEEDS_PACK, MAX_DIMS, SLOT_BYTES, STORES_STREAMING, wire_dtype,
)
from engine_ext.shared.rows cimport bounded_product

cdef const char* WRONG_ROW_COUNTS = b"it has reported numbers of rows that do not fit what it sends"


cdef bint operation_begin(
    const Operation* operation, Executor* x, Op** batch, const engine_entry* entry, int root, bint timed
) noexcept nogil:
    """Start the executor on a BATCH entry, whose operations are in `batch`; False without memory. `root` is a rank of this
    engine's world or set; -1: there is none."""
    plan_clear(&x.plan)
    x.streaming = entry.stores == STORES_STREAMING
    x.needs_pack = entry.flags & ENTRY_NEEDS_PACK != 0
    x.root, x.chunk, x.timed = root, entry.chunk, timed
    memset(&x.reduction, 0, sizeof(x.reduction))
    x.reduction.op = entry.meta.op                      # the dtypes are set for each piece
    x.reduction.count, x.reduction.streaming = x.size, x.streaming
    x.reduction.prescale, x.reduction.postscale = entry.meta.prescale, entry.meta.postscale
    x.reduction.divisor = x.size if entry.meta.op == ENGINE_AVERAGE else 1
    return operation.plan(x, batch, entry)


# ---- sizes and chunks --------------------------------------------------------------------------------------------------------

cdef int64_t bytes_of_row(const engine_meta* meta) noexcept nogil:
    """Return the bytes of one row, at most 2^62, for kinds whose first dimension may differ by rank. 1 for a group, which is
    gathered as bytes."""
    cdef uint64_t n = 1 if meta.group else <uint64_t>dtype_bytes(meta.dtype)
    cdef uint32_t d
    for d in range(1, 0 if meta.group else min(meta.ndim, <uint32_t>MAX_DIMS)):
        n = bounded_product(n, <uint64_t>meta.dims[d])
    return <int64_t>n


cdef int64_t bytes_of_all(const engine_meta* meta) noexcept nogil:
    """Return the bytes of the tensor, or of all tensors of a group."""
    cdef int64_t n = 0
    cdef int d
    if not meta.group:
        return <int64_t>bounded_product(<uint64_t>bytes_of_row(meta), <uint64_t>(meta.dims[0] if meta.ndim else 1))
    for d in range(ENGINE_DTYPES):
        n += meta.dims[d] * dtype_bytes(d)
    return n


cdef uint32_t whole_chunk(uint32_t wanted) noexcept nogil:
    """Round a chosen chunk size to the one that an entry has: whole pages, so that no element of any dtype is cut."""
    return (min(max(wanted, <uint32_t>SMALLEST_CHUNK), <uint32_t>SLOT_BYTES) + CHUNK_UNIT - 1) // CHUNK_UNIT * CHUNK_UNIT


cdef bint is_whole_chunk(uint32_t nbytes) noexcept nogil:
    """Return whether an entry can have that chunk size."""
    return nbytes == whole_chunk(nbytes)


cdef void choose_two_shot(engine_entry* entry, const engine_knobs* knobs, const Crews* crews) noexcept nogil:
    """Choose two-shot, with chunks of at most half of the entry's bytes."""
    entry.algorithm = ALGORITHM_TWO_SHOT
    entry.chunk = <uint32_t>min(<uint64_t>knobs.chunk_bytes, entry.bytes // 2)


cdef void choose_scatter(engine_entry* entry, const engine_knobs* knobs, const Crews* crews) noexcept nogil:
    """Choose chunks with a compartment for every rank."""
    entry.algorithm = ALGORITHM_SCATTER
    entry.chunk = knobs.chunk_bytes


# ---- what ranks that have joined contribute ----------------------------------------------------------------------------------

cdef void stand_in_tensor(Op* op, int size) noexcept nogil:
    """Fill in an absent tensor, or a group of absent tensors."""
    op.nbytes = <uint64_t>bytes_of_all(&op.meta) + (8 * ENGINE_DTYPES if op.meta.group else 0)     # room to align each dtype


cdef void stand_in_rows(Op* op, int size) noexcept nogil:
    """Fill in a tensor without rows."""
    op.row_bytes = <uint64_t>bytes_of_row(&op.meta)


# ---- the plan of fused tensors -----------------------------------------------------------------------------------------------

cdef bint plan_bytes(Executor* x, const char* source, char* target, uint64_t nbytes) noexcept nogil:
    """Append memory that travels unchanged, as bytes, to the plan; False without memory."""
    return plan_add(&x.plan, source, target, nbytes, ENGINE_UINT8, ENGINE_UINT8, -1) != NULL


cdef uint64_t chunks_of_plan(const Executor* x) noexcept nogil:
    """Return the number of chunks of the logical buffer."""
    return (x.plan.total + x.chunk - 1) // x.chunk if x.plan.total else 0


cdef bint plan_group(Plan* plan, const Op* op, int entry_wire) noexcept nogil:
    """Append the tensors of a group, ordered by dtype and without gaps between tensors of one dtype; False without memory. So a
    rank that has joined, which knows only the number of elements of each dtype, makes the same plan."""
    cdef const Member* member
    cdef Piece* piece
    cdef uint64_t nbytes, used = 0
    cdef bint begun
    cdef uint32_t k
    cdef int d, wire
    for d in range(ENGINE_DTYPES):
        begun, wire = False, wire_dtype(entry_wire, d)
        if op.members == NULL and op.meta.dims[d]:
            nbytes = <uint64_t>(op.meta.dims[d] * dtype_bytes(d))
            if plan_add(plan, NULL, op.target + used, nbytes, d, wire, -1) == NULL:
                return False
            used += (nbytes + 7) & ~<uint64_t>7         # aligns the next dtype; stand_in_tensor has added room for this
        for k in range(op.meta.group if op.members != NULL and op.meta.dims[d] else 0):
            member = &op.members[k]
            if member.dtype != d or member.nbytes == 0:
                continue
            if begun:
                piece = plan_append(plan, member.source, member.target, member.nbytes, d, wire, -1)
            else:
                piece = plan_add(plan, member.source, member.target, member.nbytes, d, wire, -1)
            if piece == NULL:
                return False
            begun = True
    return True


cdef bint give_target(Op* op) noexcept nogil:
    """Allocate memory for the result of an operation without a target; False without memory. A tensor that is absent here but
    present elsewhere gets the others' dtype and layout; if these differ from its own, it loses its target."""
    cdef const engine_meta* agreed = &op.record.meta
    if op.source == NULL and op.nbytes and not op.meta.device and (
            op.meta.dtype != agreed.dtype or op.meta.layout != agreed.layout):
        op.meta.dtype, op.meta.layout, op.nbytes, op.target = agreed.dtype, agreed.layout, <uint64_t>bytes_of_all(agreed), NULL
    if op.target == NULL and op.nbytes:
        op.memory = <char*>malloc(op.nbytes)
        if op.memory == NULL:
            return False
        op.memory_bytes, op.target = op.nbytes, op.memory
    return True


cdef bint plan_tensors(Executor* x, Op** batch, const engine_entry* entry) noexcept nogil:
    """Plan the tensors of the entry, one after another; False without memory."""
    cdef bint shared = entry.meta.shared >= 0, planned
    cdef int32_t i
    cdef Op* op
    for i in range(<int32_t>entry.items):
        op = batch[i]
        if not give_target(op):
            return False
        if op.meta.group:
            planned = plan_group(&x.plan, op, entry.meta.wire)
        else:
            planned = plan_add(&x.plan, op.source, op.target, op.nbytes, op.meta.dtype,
                               wire_dtype(entry.meta.wire, op.meta.dtype), op.meta.shared if shared else -1) != NULL
        if not planned:
            return False
    return True


# ---- operations -------------------------------------------------------------------------------------------------------------

# Operations of Python are created and freed with the GIL held, since each holds a reference to what keeps its tensors alive.
# Those of native calls hold none, and need no GIL.

cdef Op* make_op() noexcept nogil:
    """Return a new operation, which the caller alone owns until it is submitted; NULL without memory."""
    cdef Op* op = <Op*>calloc(1, sizeof(Op))
    if op != NULL:
        op.meta.shared, op.meta.prescale, op.meta.postscale = -1, 1.0, 1.0
        op.flags = OP_DONE
    return op


cdef Op* new_op() except NULL:
    """Return a new operation like make_op, but raise MemoryError without memory."""
    cdef Op* op = make_op()
    if op == NULL:
        raise MemoryError("no memory for an operation")
    return op


cdef void free_op(Op* op) noexcept:
    """Free an operation that the engine does not use any more, and drop its Python references. The caller holds the GIL."""
    Py_XDECREF(<PyObject*>op.owner)
    Py_XDECREF(<PyObject*>op.result)
    free_parts(op)


cdef void free_parts(Op* op) noexcept nogil:
    """Free an operation that holds no Python reference; needs no GIL."""
    free(op.call)
    free(op.memory)
    free(op.row_counts)
    free(op.splits)
    free(op.members)
    free(op.text)
    free(op)
