"""What rows of the table share: how an entry begins, sizes, chunks, and the plan of tensors that are fused."""
from cpython.object cimport PyObject
from cpython.ref cimport Py_XDECREF
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memset

from engine_ext.data.plan cimport Piece, Plan, plan_add, plan_append, plan_clear
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
    """Start a BATCH, whose operations are in `batch`. `root` is a rank here, -1 if there is none. False without memory."""
    plan_clear(&x.plan)
    x.streaming = entry.stores == STORES_STREAMING
    x.needs_pack = entry.flags & ENTRY_NEEDS_PACK != 0
    x.root, x.chunk, x.timed = root, entry.chunk, timed
    memset(&x.reduction, 0, sizeof(x.reduction))
    x.reduction.op = entry.meta.op                      # the dtypes are each piece's own
    x.reduction.count, x.reduction.streaming = x.size, x.streaming
    x.reduction.prescale, x.reduction.postscale = entry.meta.prescale, entry.meta.postscale
    x.reduction.divisor = x.size if entry.meta.op == ENGINE_AVERAGE else 1
    return operation.plan(x, batch, entry)


# ---- sizes and chunks --------------------------------------------------------------------------------------------------------

cdef int64_t bytes_of_row(const engine_meta* meta) noexcept nogil:
    """Bytes of one row, for kinds whose first dimension may differ by rank; 2^62 at most. A group is gathered as bytes."""
    cdef uint64_t n = 1 if meta.group else <uint64_t>dtype_bytes(meta.dtype)
    cdef uint32_t d
    for d in range(1, 0 if meta.group else min(meta.ndim, <uint32_t>MAX_DIMS)):
        n = bounded_product(n, <uint64_t>meta.dims[d])
    return <int64_t>n


cdef int64_t bytes_of_all(const engine_meta* meta) noexcept nogil:
    cdef int64_t n = 0
    cdef int d
    if not meta.group:
        return <int64_t>bounded_product(<uint64_t>bytes_of_row(meta), <uint64_t>(meta.dims[0] if meta.ndim else 1))
    for d in range(ENGINE_DTYPES):
        n += meta.dims[d] * dtype_bytes(d)
    return n


cdef uint32_t whole_chunk(uint32_t wanted) noexcept nogil:
    """The chunk size that an entry has where `wanted` was chosen: whole pages, so that no element is cut, whatever its dtype."""
    return (min(max(wanted, <uint32_t>SMALLEST_CHUNK), <uint32_t>SLOT_BYTES) + CHUNK_UNIT - 1) // CHUNK_UNIT * CHUNK_UNIT


cdef bint is_whole_chunk(uint32_t nbytes) noexcept nogil:
    """Whether an entry can have that chunk size."""
    return nbytes == whole_chunk(nbytes)


cdef void choose_two_shot(engine_entry* entry, const engine_knobs* knobs, const Crews* crews) noexcept nogil:
    """Two chunks at least."""
    entry.algorithm = ALGORITHM_TWO_SHOT
    entry.chunk = <uint32_t>min(<uint64_t>knobs.chunk_bytes, entry.bytes // 2)


cdef void choose_scatter(engine_entry* entry, const engine_knobs* knobs, const Crews* crews) noexcept nogil:
    entry.algorithm = ALGORITHM_SCATTER
    entry.chunk = knobs.chunk_bytes


# ---- what ranks that have joined contribute ----------------------------------------------------------------------------------

cdef void stand_in_tensor(Op* op, int size) noexcept nogil:
    """An absent tensor, or a group of such."""
    op.nbytes = <uint64_t>bytes_of_all(&op.meta) + (8 * ENGINE_DTYPES if op.meta.group else 0)     # to align each dtype


cdef void stand_in_rows(Op* op, int size) noexcept nogil:
    """No rows."""
    op.row_bytes = <uint64_t>bytes_of_row(&op.meta)


# ---- the plan of fused tensors -----------------------------------------------------------------------------------------------

cdef bint plan_bytes(Executor* x, const char* source, char* target, uint64_t nbytes) noexcept nogil:
    """What travels as it is, whatever it means. False without memory."""
    return plan_add(&x.plan, source, target, nbytes, ENGINE_UINT8, ENGINE_UINT8, -1) != NULL


cdef uint64_t chunks_of_plan(const Executor* x) noexcept nogil:
    return (x.plan.total + x.chunk - 1) // x.chunk if x.plan.total else 0


cdef bint plan_group(Plan* plan, const Op* op, int entry_wire) noexcept nogil:
    """By dtype, and without gaps between tensors of one: so a rank that has joined, and has not been told more than how many
    elements of each dtype there are, has the same plan. False without memory."""
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
            used += (nbytes + 7) & ~<uint64_t>7         # the next dtype's alignment; stand_in_tensor has made room
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
    """Absent here, present elsewhere: there is a result after all, in memory that is allocated now if there is none yet, or none
    for the others' dtype and order of elements. False without memory."""
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
    """The tensors of the entry, one after another. False without memory."""
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

# Operations of Python are made and freed with the GIL held: each holds a reference to what keeps its tensors alive. Those of
# native calls hold none, and need no GIL.

cdef Op* make_op() noexcept nogil:
    """An operation that its maker alone owns until it is submitted; NULL without memory."""
    cdef Op* op = <Op*>calloc(1, sizeof(Op))
    if op != NULL:
        op.meta.shared, op.meta.prescale, op.meta.postscale = -1, 1.0, 1.0
        op.flags = OP_DONE
    return op


cdef Op* new_op() except NULL:
    """As make_op."""
    cdef Op* op = make_op()
    if op == NULL:
        raise MemoryError("no memory for an operation")
    return op


cdef void free_op(Op* op) noexcept:
    """The GIL is held and the engine has let go of `op`."""
    Py_XDECREF(<PyObject*>op.owner)
    Py_XDECREF(<PyObject*>op.result)
    free_parts(op)


cdef void free_parts(Op* op) noexcept nogil:
    """As free_op, of an operation that holds no Python reference."""
    free(op.call)
    free(op.memory)
    free(op.row_counts)
    free(op.splits)
    free(op.members)
    free(op.text)
    free(op)
