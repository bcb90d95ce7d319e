"""The table of operations. Only this file, the enum and the border to Python depend on an operation's kind.

An operation has a file here that exports its row, a number with a name in shared/names.h, and a line below (CONTRIBUTING.md has
the recipe).
"""
from libc.stdio cimport snprintf
from libc.stdlib cimport calloc, strtod
from libc.string cimport memset

from engine_ext.data.executor cimport Executor, Steps, executor_start
from engine_ext.kernels.kernels cimport (
    ENGINE_BLOCK, ENGINE_DTYPES, ENGINE_DTYPE_NAMES, ENGINE_FLOAT32, ENGINE_FLOAT64, ENGINE_OP_NAMES, dtype_bytes,
)
from engine_ext.operations.adasum cimport adasum_row
from engine_ext.operations.allgather cimport allgather_row
from engine_ext.operations.allreduce cimport allreduce_row
from engine_ext.operations.alltoall cimport alltoall_row
from engine_ext.operations.broadcast cimport broadcast_row
from engine_ext.operations.op cimport Op
from engine_ext.operations.operation cimport SAYS_ALIGNED, choose_two_shot
from engine_ext.operations.reducescatter cimport reducescatter_row
from engine_ext.shared.layout cimport (
    DIM_DIGEST, DIM_FAULT, DIM_MOVED, DIM_SPARSE, FAULT_INDEX, KINDS, KIND_ALLGATHER, KIND_ALLREDUCE, KIND_ALLTOALL,
    KIND_BARRIER, KIND_BROADCAST, KIND_NAMES, KIND_REDUCESCATTER, LAYOUT_NAMES, LAYOUT_ROWS, LAYOUT_SPARSE, MAX_DIMS,
    WIRE_FP8, WIRE_NAMES, WIRE_TUNED, WIRE_TUNED8, engine_entry, wire_compresses, wire_dtype,
)

OPERATIONS = <const Operation**>calloc(KINDS * REDUCTIONS, sizeof(Operation*))


cdef int fill_in(int kind, Operation row, int reduction=-1) except -1:
    """Put a row into the table for good: for one `reduction`; -1: for all."""
    cdef Operation* kept = <Operation*>calloc(1, sizeof(Operation))
    cdef int k
    if kept == NULL or OPERATIONS == NULL:
        raise MemoryError("no memory for the table of operations")
    kept[0] = row
    for k in range(REDUCTIONS):
        if reduction < 0 or k == reduction:
            OPERATIONS[kind * REDUCTIONS + k] = kept
    return 0


fill_in(KIND_ALLREDUCE, allreduce_row())
fill_in(KIND_ALLREDUCE, adasum_row(), ENGINE_ADASUM)
fill_in(KIND_BROADCAST, broadcast_row())
fill_in(KIND_ALLGATHER, allgather_row())
fill_in(KIND_BARRIER, barrier_row())
fill_in(KIND_ALLTOALL, alltoall_row())
fill_in(KIND_REDUCESCATTER, reducescatter_row())


cdef int expect_rows_of_all() except -1:
    """Raise ImportError unless every kind has a row for every reduction, and every row the functions that it must have."""
    cdef const Operation* row
    cdef int k
    for k in range(KINDS * REDUCTIONS):
        row = OPERATIONS[k]
        if row == NULL or row.bytes == NULL or row.choose == NULL or row.stand_in == NULL or row.plan == NULL:
            name = kind_name(k // REDUCTIONS).decode()
            raise ImportError(f"operation {name} has no whole row in engine_ext/operations/kinds.pyx")
    return 0


expect_rows_of_all()


cdef const char* kind_name(int kind) noexcept nogil:
    return KIND_NAMES[kind]


cdef int64_t wire_bytes(const engine_meta* meta, int wire) noexcept nogil:
    """Return the bytes of an operation as they travel in an entry with this `wire`."""
    cdef const Operation* operation = operation_of(meta)
    cdef int64_t n = operation.bytes(meta)
    cdef int d
    if wire == 0 or not operation.reduces:
        return n
    if meta.group == 0:
        return bytes_as_sent(n // dtype_bytes(meta.dtype), meta.dtype, wire)
    for d in range(ENGINE_FLOAT64 + 1):
        n -= meta.dims[d] * dtype_bytes(d) - bytes_as_sent(meta.dims[d], d, wire)
    return n


cdef int64_t bytes_as_sent(int64_t items, int dtype, int wire) noexcept nogil:
    """Return the bytes of `items` elements of a dtype as they travel, scales included."""
    cdef int64_t nbytes = items * dtype_bytes(wire_dtype(wire, dtype))
    return nbytes + items // ENGINE_BLOCK if wire == WIRE_FP8 and wire_compresses(wire, dtype) else nbytes


# ---- barrier ----------------------------------------------------------------------------------------------------------------

# A barrier lets no rank go on before all have reached it. It moves nothing: its entry exists only once all have submitted it.

cdef Steps STEPS = Steps(NULL, NULL, NULL, NULL, False, False)


cdef Operation barrier_row() noexcept:
    cdef Operation row
    memset(&row, 0, sizeof(row))
    row.says = SAYS_ALIGNED
    row.bytes, row.choose, row.stand_in, row.plan = no_bytes, choose_two_shot, stand_in, plan
    return row


cdef int64_t no_bytes(const engine_meta* meta) noexcept nogil:
    return 0


cdef void stand_in(Op* op, int size) noexcept nogil:
    """Do nothing: a barrier has no tensor."""


cdef bint plan(Executor* x, Op** batch, const engine_entry* entry) noexcept nogil:
    executor_start(x, &STEPS, 0)
    return True


# ---- descriptions of metadata -----------------------------------------------------------------------------------------------

# Descriptions such as `allreduce sum float32[3, 4]` and `ranks 0, 2`. Functions return the end of the text in bytes, and never
# write past `room`. Those with `at` append to a text of that length.

cdef enum:
    PARTS = 8                   # most ranges that a list of ranks shows


cdef const char* op_name(int op) noexcept nogil:
    return ENGINE_OP_NAMES[op]


cdef const char* dtype_name(int dtype) noexcept nogil:
    return ENGINE_DTYPE_NAMES[dtype]


cdef int describe_dtypes(int first, int end, char* text, int room) noexcept nogil:
    """Describe the dtypes [first, end): `float16, bfloat16, float32`."""
    cdef int at = 0, dtype
    for dtype in range(first, end):
        at = fit(at, snprintf(text + at, room - at, "%s%s", b", " if dtype > first else b"", ENGINE_DTYPE_NAMES[dtype]), room)
    return at


cdef int describe_meta(const engine_meta* meta, char* text, int room) noexcept nogil:
    """Describe an operation: `allreduce sum float32[3, 4] on a GPU`."""
    cdef int at = 0
    cdef const Operation* operation = operation_of(meta)
    cdef bint sparse = meta.layout == LAYOUT_SPARSE             # the user calls an allreduce, which is a gather here
    cdef const char* name = kind_name(meta.kind)
    if sparse:
        name = b"sparse allreduce"
    at = fit(at, snprintf(text, room, "%s", name), room)
    if not operation.moves:
        if meta.ndim:       # an internal barrier that agrees on a size
            at = fit(at, snprintf(text + at, room - at, " of %lld bytes", <long long>meta.dims[0]), room)
        return at
    if operation.reduces or sparse:
        at = fit(at, snprintf(text + at, room - at, " %s", ENGINE_OP_NAMES[meta.op]), room)
    elif operation.rooted:
        at = fit(at, snprintf(text + at, room - at, " from root %d", meta.root), room)
    if meta.group and not sparse:
        at = describe_group(meta, text, at, room)
    else:
        at = describe_shape(meta, text, at, room)
    if sparse:
        at = fit(at, snprintf(text + at, room - at, ", sparse in %lld of its dimensions", <long long>meta.dims[DIM_SPARSE]), room)
    if meta.device:
        at = fit(at, snprintf(text + at, room - at, " on a GPU"), room)
    at = describe_wire(meta, text, at, room)
    if operation.reduces and meta.root:      # set for an optimizer's pass by GradientGroup.mark_late
        at = fit(at, snprintf(text + at, room - at, " with gradients that came after backward"), room)
    if meta.fault:
        at = describe_fault(meta, text, at, room)
    if meta.prescale != 1.0:
        at = describe_factor(b"prescale", meta.prescale, text, at, room)
    if meta.postscale != 1.0:
        at = describe_factor(b"postscale", meta.postscale, text, at, room)
    return at


cdef int describe_fault(const engine_meta* meta, char* text, int at, int room) noexcept nogil:
    cdef long long number = meta.dims[DIM_FAULT]
    if meta.fault == FAULT_INDEX:
        return fit(at, snprintf(text + at, room - at, ", with index %lld in dimension %d, which it does not have", number,
                                meta.root), room)
    return fit(at, snprintf(text + at, room - at, ", said to be coalesced, but entry %lld does not come after the one before it",
                            number), room)


cdef int describe_group(const engine_meta* meta, char* text, int at, int room) noexcept nogil:
    """Describe a group: `, a group of 3 tensors: float32 12 elements, int64 3 elements, shapes 0123456789abcdef`."""
    cdef int d
    at = fit(at, snprintf(text + at, room - at, ", a group of %u tensors: ", <unsigned int>meta.group), room)
    for d in range(ENGINE_DTYPES):
        if meta.dims[d]:
            at = fit(at, snprintf(text + at, room - at, "%s %lld elements%s, ", ENGINE_DTYPE_NAMES[d], <long long>meta.dims[d],
                                  b" in a row" if operation_of(meta).uneven else b""), room)
    if meta.dims[DIM_MOVED]:
        at = fit(at, snprintf(text + at, room - at, "other dtypes %lld elements in a row, ",
                              <long long>meta.dims[DIM_MOVED]), room)
    return fit(at, snprintf(text + at, room - at, "shapes %016llx", <unsigned long long>meta.dims[DIM_DIGEST]), room)


cdef int describe_shape(const engine_meta* meta, char* text, int at, int room) noexcept nogil:
    """Describe dtype, shape and layout: ` float32[3, 4]`, with a star for rows that may differ."""
    cdef int d
    at = fit(at, snprintf(text + at, room - at, " %s[", ENGINE_DTYPE_NAMES[meta.dtype]), room)
    for d in range(<int>meta.ndim if meta.ndim < MAX_DIMS else MAX_DIMS):
        if d == 0 and meta.layout != LAYOUT_SPARSE and operation_of(meta).uneven:
            at = fit(at, snprintf(text + at, room - at, "*"), room)
        else:
            at = fit(at, snprintf(text + at, room - at, "%s%lld", b", " if d else b"", <long long>meta.dims[d]), room)
    if meta.layout == LAYOUT_ROWS or meta.layout == LAYOUT_SPARSE:      # a sparse layout is in the operation's name
        return fit(at, snprintf(text + at, room - at, "]"), room)
    return fit(at, snprintf(text + at, room - at, "] %s", LAYOUT_NAMES[meta.layout]), room)


cdef int describe_wire(const engine_meta* meta, char* text, int at, int room) noexcept nogil:
    if meta.wire == 0:
        return at
    if meta.wire == WIRE_TUNED or meta.wire == WIRE_TUNED8:
        return fit(at, snprintf(text + at, room - at, b" compressed as tuned%s", b"8" if meta.wire == WIRE_TUNED8 else b""), room)
    if meta.wire == WIRE_FP8:       # not a cast: blocks with scales
        return fit(at, snprintf(text + at, room - at, " compressed to %s", WIRE_NAMES[meta.wire]), room)
    return fit(at, snprintf(text + at, room - at, " compressed to %s",
                            ENGINE_DTYPE_NAMES[wire_dtype(meta.wire, ENGINE_FLOAT32)]), room)


cdef int describe_factor(const char* what, double factor, char* text, int at, int room) noexcept nogil:
    """Describe a factor, with as many digits as distinguish it from any other number."""
    cdef char[32] digits
    cdef int precision
    for precision in range(6, 18):
        snprintf(digits, sizeof(digits), "%.*g", precision, factor)
        if strtod(digits, NULL) == factor:
            break
    return fit(at, snprintf(text + at, room - at, " %s %s", what, digits), room)


cdef int end_of_run(const bint* chosen, const int* numbers, int size, int first) noexcept nogil:
    """Return the last index of the range that begins with `first`: of a run of three numbers or more, else `first` itself."""
    cdef int last = first, r
    for r in range(first + 1, size):
        if chosen == NULL or chosen[r]:
            if numbers[r] != numbers[last] + 1:
                break
            last = r
    return last if numbers[last] > numbers[first] + 1 else first


cdef int describe_ranks(const bint* chosen, const int* numbers, int size, char* text, int room) noexcept nogil:
    """Describe the chosen ranks as `rank 3`, `ranks 0, 1` or `ranks 0-2, 5`, by their `numbers` in the world, in the set's order.
    `chosen` NULL: all ranks. More than PARTS ranges are shortened to the first ones and the last, as in engine/text/readable.py.
    """
    cdef int at, count = 0, parts = 0, shown = 0, r = 0, last
    while r < size:
        if chosen == NULL or chosen[r]:
            last = end_of_run(chosen, numbers, size, r)
            count, parts, r = count + 1 + last - r, parts + 1, last
        r += 1
    at = fit(0, snprintf(text, room, "rank%s ", b"" if count == 1 else b"s"), room)
    r = 0
    while r < size:
        if chosen == NULL or chosen[r]:
            last = end_of_run(chosen, numbers, size, r)
            shown += 1
            if parts <= PARTS or shown < PARTS or shown == parts:
                at = fit(at, snprintf(text + at, room - at, b"%s%d-%d" if last > r else b"%s%d", b", " if shown > 1 else b"",
                                      numbers[r], numbers[last]), room)
            elif shown == PARTS:
                at = fit(at, snprintf(text + at, room - at, ", .."), room)
            r = last
        r += 1
    return at
