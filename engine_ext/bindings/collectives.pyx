"""Build the operation that each collective submits from the arguments of its call.

Each function raises an error for wrong arguments. The operation that it returns keeps alive the memory it points to. The caller
submits the operation (submit.pyx).
"""
from cpython.unicode cimport PyUnicode_AsUTF8AndSize
from libc.math cimport isfinite
from libc.stdint cimport INT32_MAX, int32_t
from libc.stdio cimport snprintf
from libc.stdlib cimport malloc
from libc.string cimport memset, strlen

from engine_ext.bindings.devices cimport set_allocator, expect_same_device, mark_ready
from engine_ext.bindings.groups cimport group_add, group_expect_apart, group_gather, group_open, group_sparse
from engine_ext.bindings.memory cimport Memory, copy_memory, keep_alive
from engine_ext.bindings.refusals cimport set_text
from engine_ext.bindings.view cimport HOST, MISALIGNED, expect_dense, view_anywhere, view_directly, view_of
from engine_ext.control.driver cimport driver_note_thread
from engine_ext.kernels.kernels cimport (
    ENGINE_ADASUM, ENGINE_AVERAGE, ENGINE_BOOL, ENGINE_DTYPES, ENGINE_FLOAT64, ENGINE_SUM, ENGINE_UINT8,
)
from engine_ext.operations.kinds cimport describe_dtypes, dtype_name, op_name
from engine_ext.operations.operation cimport free_op, new_op
from engine_ext.platform.atomics cimport load32_relaxed
from engine_ext.shared.layout cimport (
    KIND_ALLGATHER, KIND_ALLREDUCE, KIND_ALLTOALL, KIND_BARRIER, KIND_BROADCAST, KIND_REDUCESCATTER, LAYOUT_ROWS, NAME_BYTES,
    WIRE_BF16, WIRE_FP16, wire_compresses,
)
from engine_ext.shared.rows cimport bounded_product
from engine_ext.transport.arena cimport arena_locate

from operator import index

from engine_ext import errors
from engine_ext.errors import ArgumentError, UnsupportedTensorError


# ---- shared helpers --------------------------------------------------------------------------------------------------

cdef Op* tensor_op(int kind, const View* source, const View* target, object owner) except NULL:
    """Make an operation on one tensor, whose memory `owner` keeps alive. `target` NULL: the engine allocates the result."""
    cdef Op* op = new_op()
    fill_meta(&op.meta, kind, source)
    op.source, op.nbytes = source.data, source.nbytes
    if target != NULL:
        op.target = target.data
    keep_alive(op, owner)
    return op


cdef Op* gathering_op(int kind, object tensor, const View* source, object keeper, object room, object output) except NULL:
    """Make an operation on rows of `tensor`. Its result goes into `output`, in host memory, if that has the result's length."""
    cdef View target
    cdef Op* op
    if output is None:
        return tensor_op(kind, source, NULL, (tensor, keeper, room))
    target_keeper = view_anywhere(output, &target)
    expect_same_device(output, &target, source, "the output")
    expect_dense(output, &target, "the output")
    if target.device != HOST:
        raise UnsupportedTensorError("results on GPUs are made by `room`, not given")
    if target.dtype != source.dtype or target.layout != source.layout:
        raise ArgumentError("the output has another dtype or layout than the tensor")
    if target.readonly:
        raise ArgumentError("the output is read-only")
    op = tensor_op(kind, source, &target, (tensor, keeper, output, target_keeper))
    op.memory_bytes = target.nbytes
    return op


cdef void fill_reduction(Op* brought, int op, double prescale, double postscale) noexcept nogil:
    """Set the reduction and its factors in an operation's metadata."""
    brought.meta.op, brought.meta.prescale, brought.meta.postscale = <unsigned char>op, prescale, postscale


cdef uint64_t row_bytes(const View* view) noexcept nogil:
    """Return the bytes of one row of a view: of an index of its first dimension."""
    cdef uint64_t nbytes = <uint64_t>view.itemsize
    cdef int d
    for d in range(1, view.ndim):
        nbytes = bounded_product(nbytes, <uint64_t>view.dims[d])
    return nbytes


cdef int64_t own_rows(const State* e, int64_t rows) noexcept nogil:
    """Return how many of `rows` rows a reduce-scatter gives to this rank."""
    return rows // e.segment.size + (e.segment.rank < rows % e.segment.size)


# ---- reductions ------------------------------------------------------------------------------------------------------

cdef Op* allreduce_op(State* e, object tensor, object output, int op, double prescale, double postscale, object wire) except NULL:
    """Make an allreduce of `tensor` into `output`, which may be the same object."""
    cdef View source, target
    cdef Op* brought
    cdef int chosen = wire_number(wire, op)
    cdef object keeper = view_anywhere(tensor, &source), kept
    expect_dense(tensor, &source, "the tensor")
    expect_reduction(False, &source, op, chosen, prescale, postscale, e.segment.size)
    kept = same_shape(tensor, &source, output, &target, source.dims[0])
    brought = tensor_op(KIND_ALLREDUCE, &source, &target, (tensor, output, keeper, kept))
    fill_reduction(brought, op, prescale, postscale)
    brought.meta.wire = wire_of(chosen, source.dtype)
    if source.device != HOST:
        get_ready(e, brought, tensor, &source)
    elif source.data == target.data and op != ENGINE_ADASUM and may_share(&brought.meta):
        # Adasum reads the whole tensor for its inner products before it writes, so it cannot reduce in shared memory.
        brought.meta.shared = arena_locate(&e.arena, source.data, source.nbytes)
    return brought


cdef Op* direct_allreduce_op(State* e, object tensor, int op, double prescale, double postscale) except? NULL:
    """Make an allreduce in place of a tensor that lends its memory directly. Return NULL if the tensor needs a closer look, or if
    the allreduce is refused."""
    cdef char[FAULT_BYTES] text
    cdef View view
    cdef Op* brought
    if not view_directly(tensor, &view) or reduction_fault(False, &view, op, 0, prescale, postscale, e.segment.size, text):
        return NULL
    brought = tensor_op(KIND_ALLREDUCE, &view, &view, tensor)
    fill_reduction(brought, op, prescale, postscale)
    if op != ENGINE_ADASUM:             # Adasum reads all before it writes
        brought.meta.shared = arena_locate(&e.arena, view.data, view.nbytes)
    return brought


cdef int get_ready(State* e, Op* brought, object tensor, const View* view, object room=None,
                   bint makes_room=False) except -1:
    """Mark when the GPU tensors of an operation are ready, or free the operation and raise. With `makes_room`, `room` is the
    function that allocates the operation's result."""
    try:
        if makes_room:
            set_allocator(brought, room, view)
        elif brought.meta.op == ENGINE_ADASUM:
            raise UnsupportedTensorError(
                f"Adasum takes tensors in the host's memory, and this one is on cuda:{view.device - 1}; move it with .cpu()"
            )
        mark_ready(e, brought, tensor, view)
    except BaseException:
        free_op(brought)
        raise
    return 0


cdef Op* reducescatter_op(State* e, object tensor, object output, int op, double prescale, double postscale,
                          object wire) except NULL:
    """Make a reduce-scatter of `tensor`; `output` receives the rows of this rank."""
    cdef View source, target
    cdef Op* brought
    cdef int chosen = wire_number(wire, op)
    cdef object keeper = view_anywhere(tensor, &source), kept
    expect_rows(tensor, &source, "a reduce-scatter divides")
    expect_reduction(True, &source, op, chosen, prescale, postscale, e.segment.size)
    kept = same_shape(tensor, &source, output, &target, own_rows(e, source.dims[0]))
    brought = tensor_op(KIND_REDUCESCATTER, &source, &target, (tensor, output, keeper, kept))
    fill_reduction(brought, op, prescale, postscale)
    brought.meta.wire, brought.row_bytes = wire_of(chosen, source.dtype), row_bytes(&source)
    if source.device != HOST:
        get_ready(e, brought, tensor, &source)
    return brought


cdef Op* reduce_group_op(State* e, int kind, list tensors, list outputs, int op, double prescale, double postscale,
                         object wire) except NULL:
    """Make one operation on several tensors, which is scheduled as a whole once every rank has submitted it."""
    cdef View first, source, target
    cdef Op* brought
    cdef list keepers = []
    cdef Py_ssize_t k, count = len(tensors)
    cdef int64_t rows
    cdef int chosen = wire_number(wire, op)
    if len(outputs) != count:
        raise ValueError(f"a group of {count} tensors has as many outputs, not {len(outputs)}")
    brought = new_op()
    keep_alive(brought, (tensors, outputs, keepers))
    try:
        group_open(brought, kind, count)
        for k in range(count):
            keepers.append(group_add(brought, k, tensors[k], &source))
            if k == 0:
                first = source
            expect_same_device(tensors[k], &source, &first, f"tensor {k} of the group")
            expect_reduction(kind == KIND_REDUCESCATTER, &source, op, chosen, prescale, postscale, e.segment.size)
            rows = source.dims[0]
            if kind == KIND_REDUCESCATTER:
                expect_rows(tensors[k], &source, "a reduce-scatter divides")
                rows = own_rows(e, rows)
            keepers.append(same_shape(tensors[k], &source, outputs[k], &target, rows))
            brought.members[k].target = target.data
        if kind == KIND_ALLREDUCE and tensors is outputs:
            group_expect_apart(brought)
    except BaseException:
        free_op(brought)
        raise
    fill_reduction(brought, op, prescale, postscale)
    brought.meta.wire = wire_of_group(chosen, &brought.meta)
    if first.device != HOST:
        get_ready(e, brought, tensors[0], &first)
    return brought


# ---- data movement ---------------------------------------------------------------------------------------------------

cdef Op* broadcast_op(State* e, object tensor, object output, Py_ssize_t root) except NULL:
    """Make a broadcast of `tensor` from rank `root` of the world into `output`, which may be the same object."""
    cdef View source, target
    cdef Op* brought
    cdef object keeper, kept
    expect_root(e, root)
    keeper = view_anywhere(tensor, &source)
    expect_dense(tensor, &source, "the tensor")
    kept = same_shape(tensor, &source, output, &target, source.dims[0])
    brought = tensor_op(KIND_BROADCAST, &source, &target, (tensor, output, keeper, kept))
    brought.meta.root = <int32_t>root
    if source.device != HOST:
        get_ready(e, brought, tensor, &source)
    return brought


cdef int expect_root(State* e, Py_ssize_t root) except -1:
    """Raise ArgumentError unless `root`, a rank of the world, is a member of this engine."""
    cdef int r
    for r in range(e.segment.size):
        if e.segment.numbers[r] == root:
            return 0
    where = f"this world of {e.segment.size} ranks (0 to {e.segment.size - 1})" if e.world == e else \
        f"this process set, which has {set_text(e)} of the world"
    raise ArgumentError(f"root rank {root} is not in {where}")


cdef Op* allgather_op(State* e, object tensor, object room, object output) except NULL:
    """Make an allgather of the rows of `tensor`.

    `room`: for a tensor on a GPU, a function that allocates results of given sizes on the current stream. `output`: receives the
    result if it has the same length; None, or another length: the engine allocates the result.
    """
    cdef View source
    cdef Op* brought
    cdef object keeper = view_anywhere(tensor, &source)
    expect_rows(tensor, &source, "an allgather joins")
    brought = gathering_op(KIND_ALLGATHER, tensor, &source, keeper, room, output)
    brought.meta.dims[0] = 0
    brought.rows, brought.row_bytes = source.dims[0], row_bytes(&source)
    if source.device != HOST:
        get_ready(e, brought, tensor, &source, room, True)
    return brought


cdef Op* allgather_group_op(State* e, list tensors, object sparse, object room) except NULL:
    """Make an allgather of several tensors. `room` as for `allgather_op`.

    `sparse`: None, or shape, reduction, prescale, postscale and fault of the sparse tensor whose indices and values are the two
    tensors.
    """
    cdef View first, source
    cdef Op* brought
    cdef list keepers = []
    cdef Py_ssize_t k, count = len(tensors)
    cdef int op
    brought = new_op()
    keep_alive(brought, (tensors, keepers, room))
    try:
        group_open(brought, KIND_ALLGATHER, count)
        for k in range(count):
            keepers.append(group_add(brought, k, tensors[k], &source))
            if k == 0:
                first = source
            expect_same_device(tensors[k], &source, &first, f"tensor {k} of the group")
            expect_rows(tensors[k], &source, "an allgather joins")
        group_gather(brought)
        if sparse is not None:
            shape, op, brought.meta.prescale, brought.meta.postscale, fault = sparse
            if not 0 <= op <= ENGINE_ADASUM:
                raise ArgumentError(f"there is no reduction {op}")
            brought.meta.op = <unsigned char>op
            group_sparse(brought, shape, fault)
    except BaseException:
        free_op(brought)
        raise
    if first.device != HOST:
        get_ready(e, brought, tensors[0], &first, room, True)
    return brought


cdef Op* alltoall_op(State* e, object tensor, object splits, object room, object output) except NULL:
    """Make an all-to-all; `splits` holds the number of rows for each rank. `room` and `output` as for `allgather_op`."""
    cdef View source
    cdef Op* brought
    cdef int r, size = e.segment.size
    cdef object keeper = view_anywhere(tensor, &source)
    expect_rows(tensor, &source, "an all-to-all sends")
    try:
        counts = [index(each) for each in splits]
    except TypeError as error:
        raise UnsupportedTensorError(f"splits holds whole numbers, one for each rank: {error}") from None
    if len(counts) != size:
        raise ArgumentError(f"splits says how many rows go to each of {size} ranks, but has {len(counts)} numbers")
    if min(counts) < 0 or sum(counts) > source.dims[0]:
        raise ArgumentError(f"splits {counts} cannot be taken from the {source.dims[0]} rows of the tensor")
    if max(counts) > INT32_MAX:
        raise ArgumentError(f"splits {counts}: each rank gets {INT32_MAX} rows at most, since received_splits is int32; make "
                            "rows longer, or call it several times")
    brought = gathering_op(KIND_ALLTOALL, tensor, &source, keeper, room, output)
    brought.meta.dims[0] = 0
    brought.row_bytes = row_bytes(&source)
    brought.splits = <int64_t*>malloc(<size_t>size * sizeof(int64_t))
    if brought.splits == NULL:
        free_op(brought)
        raise MemoryError("no memory for splits")
    for r in range(size):
        brought.splits[r] = counts[r]       # fits: none is negative, and their sum is at most the number of rows
    if source.device != HOST:
        get_ready(e, brought, tensor, &source, room, True)
    return brought


# ---- messages --------------------------------------------------------------------------------------------------------

# A message is an allgather of bytes between two ranks; the receiver contributes no bytes.

cdef Op* message_op(uint64_t nbytes) except NULL:
    """Make an allgather of `nbytes` bytes, without memory."""
    cdef Op* op = new_op()
    cdef View view
    memset(&view, 0, sizeof(View))
    view.dtype, view.layout, view.ndim = ENGINE_UINT8, LAYOUT_ROWS, 1
    fill_meta(&op.meta, KIND_ALLGATHER, &view)
    op.nbytes, op.rows, op.row_bytes = nbytes, <int64_t>nbytes, 1
    return op


cdef object view_bytes(object tensor, View* view, str role):
    """Describe a host tensor as `view_of` does. It must be row-major, but may begin at any address."""
    cdef object keeper = view_of(tensor, view)
    if view.layout != LAYOUT_ROWS and view.layout != MISALIGNED:
        raise UnsupportedTensorError(f"{role} is not contiguous; make it contiguous first")
    return keeper


cdef Op* send_op(object tensor, bint copy) except NULL:
    """Make the sending half of a message. `copy`: send a copy, so that the caller may change the tensor at once."""
    cdef View source
    cdef object keeper = view_bytes(tensor, &source, "what is sent")
    cdef Memory own = copy_memory(source.data, source.nbytes) if copy else None
    cdef Op* op = message_op(source.nbytes)
    op.source = op.target = own.data if copy else source.data       # the gathered result is the message itself
    op.memory_bytes = op.nbytes
    keep_alive(op, own if copy else (tensor, keeper))
    return op


cdef Op* receive_op(object output) except NULL:
    """Make the receiving half of a message. `output`: a tensor of the message's length; None: the engine allocates the result."""
    cdef View target
    cdef object keeper
    cdef Op* op
    if output is None:
        op = message_op(0)
        keep_alive(op, None)
        return op
    keeper = view_bytes(output, &target, "what is received into")
    if target.readonly:
        raise ArgumentError("what is received into is read-only")
    op = message_op(0)
    op.target, op.memory_bytes = target.data, target.nbytes
    keep_alive(op, (output, keeper))
    return op


# ---- barriers --------------------------------------------------------------------------------------------------------

cdef Op* barrier_op(State* e, object name, bint blocking) except NULL:
    """Make a barrier. An unnamed, blocking one of a single-threaded rank also aligns the numbers of unnamed operations."""
    cdef Op* brought = new_op()
    driver_note_thread(e)
    brought.meta.kind = KIND_BARRIER
    brought.rows = name is None and blocking and not load32_relaxed(&e.many_threads)      # whether ranks align behind it
    return brought


cdef Op* size_barrier_op(uint64_t nbytes) except NULL:
    """Make a barrier that fails unless all ranks pass the same size, before they allocate something of that size."""
    cdef Op* brought = new_op()
    brought.meta.kind, brought.meta.ndim, brought.meta.dims[0] = KIND_BARRIER, 1, <int64_t>nbytes
    return brought


# ---- arguments --------------------------------------------------------------------------------------------------------------

# Arguments of a collective: checked against what the engine supports, and stored in an operation.

cdef const char* expect_name(object name, uint32_t* length) except NULL:
    """Return the UTF-8 text of an operation's name, which lives as long as `name`, and its byte length in `length`."""
    cdef Py_ssize_t nbytes
    cdef const char* text = PyUnicode_AsUTF8AndSize(name, &nbytes)
    if not 0 < nbytes <= NAME_BYTES:
        raise ValueError(f"a name has 1 to {NAME_BYTES} bytes of UTF-8; this one has {nbytes}")
    length[0] = <uint32_t>nbytes
    return text


cdef void fill_meta(engine_meta* meta, int kind, const View* view) noexcept nogil:
    """Set kind, dtype, layout, shape and device in zeroed metadata."""
    cdef int d
    meta.kind, meta.dtype = <unsigned char>kind, view.dtype
    meta.device = view.device != HOST
    meta.layout, meta.ndim = <unsigned char>view.layout, <uint32_t>view.ndim
    for d in range(view.ndim):
        meta.dims[d] = view.dims[d]


cdef int wire_number(object wire, int op) except -1:
    """Return `meta.wire` of a float32 tensor for a compression: a WIRE_* number, WIRE_TUNED and WIRE_TUNED8 included. None: 0."""
    if wire is None:
        return 0
    if op == ENGINE_ADASUM:
        raise ArgumentError(f"Adasum does not compress tensors; their compression would be {wire}")
    if wire == "float16":
        return WIRE_FP16
    if wire == "bfloat16":
        return WIRE_BF16
    if wire == "float8":
        return WIRE_FP8
    if wire == "tuned":
        return WIRE_TUNED
    if wire == "tuned8":
        return WIRE_TUNED8
    raise ArgumentError(f"tensors are compressed to float16, bfloat16 or float8, or as tuned or tuned8, not {wire!r}")


cdef unsigned char wire_of(int chosen, int dtype) noexcept nogil:
    """Return `meta.wire` of a tensor: `chosen` if it compresses tensors of that dtype, else 0."""
    return <unsigned char>chosen if wire_compresses(chosen, dtype) else 0


cdef unsigned char wire_of_group(int chosen, const engine_meta* meta) noexcept nogil:
    """Return `meta.wire` of a group: `chosen` if it compresses any of the group's tensors, else 0."""
    cdef int d
    for d in range(ENGINE_DTYPES):
        if meta.dims[d] and wire_compresses(chosen, d):
            return <unsigned char>chosen
    return 0


cdef bint wire_fault(int wire, bint parts, int op, int device, char* text) noexcept nogil:
    """Return whether tensors on `device` cannot be reduced with a compression; if so, write the error into `text` as
    `reduction_fault` does. WIRE_TUNED and WIRE_TUNED8 are never at fault: where fp8 is impossible, they use bf16."""
    text[0] = 0
    if wire != WIRE_FP8:
        return False
    if parts:
        snprintf(text, FAULT_BYTES, "ArgumentError: a reduce-scatter does not take Compression.fp8, which sums whole tensors; "
                 "use Compression.bf16, or allreduce")
    elif op != ENGINE_SUM and op != ENGINE_AVERAGE:
        snprintf(text, FAULT_BYTES, "ArgumentError: Compression.fp8 takes Sum and Average, which it adds up in float32, not the "
                 "reduction %s; use Compression.bf16, or leave out compression", op_name(op))
    elif device != HOST:
        snprintf(text, FAULT_BYTES, "UnsupportedTensorError: Compression.fp8 takes tensors in the host's memory, and this one is "
                 "on cuda:%d; use Compression.bf16, or move it with .cpu()", device - 1)
    return text[0] != 0


cdef int expect_rows(object tensor, const View* view, str verb) except -1:
    """Raise UnsupportedTensorError unless a tensor is row-major and has rows; `verb` begins the message."""
    if view.layout != LAYOUT_ROWS:
        expect_dense(tensor, view, "the tensor")
        raise UnsupportedTensorError(f"{verb} rows; make the channels_last tensor row-major first")
    if view.ndim == 0:
        raise UnsupportedTensorError(f"{verb} rows, and a scalar has none; reshape it to one row")
    return 0


cdef bint reduction_fault(bint parts, const View* view, int op, int wire, double prescale, double postscale, int size,
                          char* text) noexcept nogil:
    """Return whether a reduction is impossible; if so, write error class, colon and message into `text`, of FAULT_BYTES. `parts`:
    each rank receives only its part of the result, as in a reduce-scatter."""
    text[0] = 0
    if not ENGINE_SUM <= op <= ENGINE_ADASUM:
        snprintf(text, FAULT_BYTES, "ArgumentError: there is no reduction number %d; use Sum, Average, Min, Max, Product or "
                 "Adasum", op)
    elif parts and op == ENGINE_ADASUM:
        snprintf(text, FAULT_BYTES, "UnsupportedOperationError: a reduce-scatter takes Sum, Average, Min, Max or Product, not "
                 "Adasum; use allreduce")
    elif view.dtype >= ENGINE_DTYPES:
        snprintf(text, FAULT_BYTES, "UnsupportedTensorError: the tensor has the dtype %s, which broadcast, allgather and "
                 "alltoall move, but nothing reduces; convert it to one of ", dtype_name(view.dtype))
        describe_dtypes(0, ENGINE_DTYPES, text + strlen(text), FAULT_BYTES - <int>strlen(text))
    elif op == ENGINE_ADASUM and size & (size - 1):
        snprintf(text, FAULT_BYTES, "UnsupportedOperationError: Adasum combines ranks in pairs of pairs: it takes 1, 2, 4, 8 .. "
                 "ranks, and these are %d", size)
    elif op == ENGINE_ADASUM and view.dtype > ENGINE_FLOAT64:
        snprintf(text, FAULT_BYTES, "UnsupportedTensorError: Adasum takes float16, bfloat16, float32 and float64 tensors only; "
                 "convert it, or use Sum")
    elif not (isfinite(prescale) and isfinite(postscale)):
        snprintf(text, FAULT_BYTES, "ArgumentError: factors are finite numbers, not prescale %g and postscale %g", prescale,
                 postscale)
    elif view.dtype == ENGINE_BOOL and (op == ENGINE_AVERAGE or prescale != 1.0 or postscale != 1.0):
        snprintf(text, FAULT_BYTES, "UnsupportedTensorError: a bool tensor has no Average and no scale; use Sum or Max (any "
                 "rank), Min or Product (all ranks), or convert it")
    return text[0] != 0 or wire_fault(wire, parts, op, view.device, text)


cdef int expect_reduction(bint parts, const View* view, int op, int wire, double prescale, double postscale,
                          int size) except -1:
    """Raise the error that `reduction_fault` describes, if there is one."""
    cdef char[FAULT_BYTES] text
    if reduction_fault(parts, view, op, wire, prescale, postscale, size, text):
        raise_text(text)
    return 0


cdef int raise_text(const char* text) except -1:
    """Raise the error described by `text`: a class of engine_ext/errors.py, a colon, and the message."""
    kind, _, message = (<bytes>text).decode("utf-8", "replace").partition(": ")
    raise getattr(errors, kind)(message)


cdef object same_shape(object tensor, const View* source, object output, View* target, int64_t rows):
    """View the output in `target` and check it against the input; return the object that keeps its memory alive, or None.

    An input with dimensions has an output of `rows` rows.
    """
    cdef int d
    cdef object keeper
    if output is tensor:
        target[0] = source[0]
        keeper = None
    else:
        keeper = view_anywhere(output, target)
        expect_same_device(output, target, source, "the output")
        expect_dense(output, target, "the output")
        if target.dtype != source.dtype or target.ndim != source.ndim or target.layout != source.layout:
            raise ValueError("the output has another dtype or shape than the tensor")
        for d in range(source.ndim):
            if target.dims[d] != (source.dims[d] if d else rows):
                raise ValueError("the output has another shape than the tensor")
    if target.readonly:
        raise ValueError("the output is read-only")
    return keeper
