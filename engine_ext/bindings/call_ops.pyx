"""Build the operation that a native call submits; collectives.pyx does the same for calls from Python.

Both use the same functions to fill in what the ranks compare. So a rank that calls from Python and one that calls from compiled
code meet in one operation. Nothing here holds the GIL or raises. An error text begins with the name of the exception class.
"""
from libc.stdint cimport INT32_MAX, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdio cimport snprintf
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

from engine_ext.bindings.calls cimport (
    ENGINE_CALL_DIMS, ENGINE_CALL_GROUP, ENGINE_CALL_NO_MEMORY, ENGINE_CALL_OK, ENGINE_CALL_REFUSED, engine_call_tensor,
)
from engine_ext.bindings.collectives cimport (
    FAULT_BYTES, fill_meta, fill_reduction, own_rows, reduction_fault, row_bytes, wire_of, wire_of_group,
)
from engine_ext.bindings.groups cimport Extent, find_overlap, group_begin, group_count, group_payload
from engine_ext.bindings.view cimport View
from engine_ext.kernels.kernels cimport ENGINE_ADASUM, ENGINE_ALL_DTYPES, dtype_bytes
from engine_ext.operations.kinds cimport dtype_name, kind_name, operation_of
from engine_ext.operations.operation cimport SAYS_ROWS, Operation
from engine_ext.shared.layout cimport KINDS, LAYOUT_ROWS, MAX_GROUP, WIRES, WIRE_TUNED, WIRE_TUNED8

cdef bint write_argument_error(char* text, const char* what) noexcept nogil:
    """Write an ArgumentError about `what` into `text`, of FAULT_BYTES; always return False."""
    snprintf(text, FAULT_BYTES, "ArgumentError: %s", what)
    return False


cdef bint view_tensor(const engine_call_tensor* tensor, uint32_t k, View* view, char* text) noexcept nogil:
    """Describe tensor `k` of a call in `view`. If the engine does not take it, return False and write the reason into `text`."""
    cdef uint64_t count = 1, most       # elements; `most` keeps their product from overflowing
    cdef int d
    memset(view, 0, sizeof(View))
    if not 0 <= tensor.dtype < ENGINE_ALL_DTYPES:
        snprintf(text, FAULT_BYTES, "UnsupportedTensorError: tensor %u has a dtype that the engine does not take", k)
        return False
    if not 0 <= tensor.ndim <= ENGINE_CALL_DIMS:
        snprintf(text, FAULT_BYTES, "UnsupportedTensorError: tensor %u has %d dimensions; there are at most %d", k, tensor.ndim,
                 <int>ENGINE_CALL_DIMS)
        return False
    view.dtype, view.ndim, view.layout = <uint8_t>tensor.dtype, tensor.ndim, LAYOUT_ROWS
    view.itemsize = <int>dtype_bytes(tensor.dtype)
    most = (<uint64_t>1 << 62) // <uint64_t>view.itemsize
    for d in range(tensor.ndim):
        if tensor.dims[d] < 0 or (tensor.dims[d] and count > most // <uint64_t>tensor.dims[d]):
            snprintf(text, FAULT_BYTES, "ArgumentError: tensor %u has %lld elements in dimension %d, which cannot be", k,
                     <long long>tensor.dims[d], d)
            return False
        view.dims[d] = tensor.dims[d]
        count *= <uint64_t>tensor.dims[d]
    view.data, view.count, view.nbytes = <char*>tensor.source, count, count * <uint64_t>view.itemsize
    if count and (view.data == NULL or <uint64_t>view.data % <uint64_t>view.itemsize):
        snprintf(text, FAULT_BYTES, "UnsupportedTensorError: tensor %u has no memory, or memory that does not begin at a "
                 "multiple of its elements' size (%s)", k, dtype_name(view.dtype))
        return False
    return True


cdef bint has_rows(const View* view, const engine_call* call, char* text) noexcept nogil:
    """Return whether a tensor has rows. If not, write the reason into `text`, as the checks below do."""
    if view.ndim:
        return True
    snprintf(text, FAULT_BYTES, "UnsupportedTensorError: %s takes rows, and a scalar has none; reshape it to one row",
             kind_name(call.kind))
    return False


cdef bint has_root(const State* e, int root, char* text) noexcept nogil:
    """Return whether the world's rank `root` is a member of this world or process set."""
    cdef int r
    for r in range(e.segment.size):
        if e.segment.numbers[r] == root:
            return True
    snprintf(text, FAULT_BYTES, "ArgumentError: root rank %d is not among the %d ranks of this %s", root, e.segment.size,
             b"world" if e.world == e else b"process set")
    return False


cdef bint fits_operation(const Operation* row, const engine_call* call, char* text) noexcept nogil:
    """Return whether the number of tensors, the group flag and the compression of a call suit its operation."""
    if not row.moves:
        return call.count == 0 or write_argument_error(text, b"a barrier has no tensors")
    if call.flags & ENGINE_CALL_GROUP:
        if not (row.reduces or row.says == SAYS_ROWS):
            return write_argument_error(text, b"there are groups of allreduce, allgather and reducescatter only")
        if not 0 < call.count <= MAX_GROUP:
            snprintf(text, FAULT_BYTES, "ArgumentError: a group has 1 to %d tensors, not %u", <int>MAX_GROUP, call.count)
            return False
    elif call.count != 1:
        return write_argument_error(text, b"without ENGINE_CALL_GROUP a call has one tensor")
    if call.tensors == NULL:
        return write_argument_error(text, b"a call has no tensors")
    if call.wire >= WIRES and call.wire != WIRE_TUNED and call.wire != WIRE_TUNED8:
        return write_argument_error(text, b"there is no compression of that number")
    if call.wire and row.reduces and call.op == ENGINE_ADASUM:
        return write_argument_error(text, b"Adasum does not compress tensors")
    return True


cdef bint view_member(const State* e, const Operation* row, const engine_call* call, uint32_t k, View* view,
                      char* text) noexcept nogil:
    """Describe tensor `k` of a call in `view`. If the operation does not take it, return False and write the reason into
    `text`."""
    cdef const engine_call_tensor* tensor = &call.tensors[k]
    cdef bint received
    if not view_tensor(tensor, k, view, text):
        return False
    if row.reduces and reduction_fault(
            row.parts, view, call.op, call.wire, call.prescale, call.postscale, e.segment.size, text):
        return False
    if (row.uneven or row.parts) and not has_rows(view, call, text):
        return False
    received = not row.parts or own_rows(e, view.dims[0]) > 0
    if received and (row.reduces or row.rooted) and view.nbytes and (
            tensor.target == NULL or <uint64_t>tensor.target % <uint64_t>view.itemsize):
        return write_argument_error(text, b"a tensor has no memory for its result, or memory that is not aligned to its elements")
    return True


cdef uint64_t extents_of(const State* e, const Operation* row, const char* source, const char* target, const View* view, int k,
                         Extent* extents) noexcept nogil:
    """Write the memory extents of a tensor and its result into `extents`; return how many there are.

    There is one extent if the result lies in the tensor's memory, two if it lies apart, and none if both are empty.
    """
    cdef uint64_t nbytes = view.nbytes
    cdef int count = 0
    if row.parts and view.nbytes:
        nbytes = <uint64_t>own_rows(e, view.dims[0]) * row_bytes(view)
    if source != target and view.nbytes:
        extents[0].begin, extents[0].end, extents[0].index, extents[0].reads = source, source + view.nbytes, k, True
        count = 1
    if target != NULL and nbytes:
        extents[count].begin, extents[count].index, extents[count].reads = target, k, False
        extents[count].end = target + (view.nbytes if source == target else nbytes)
        count += 1
    return count


cdef bint lie_apart(Extent* extents, uint64_t count, char* text) noexcept nogil:
    """Return whether no result overlaps other memory of the call. If one does, write the reason into `text`."""
    cdef int one = 0, other = 0
    if not find_overlap(extents, <Py_ssize_t>count, &one, &other):
        return True
    if one == other:
        return write_argument_error(
            text, b"a tensor and its result overlap: the result is to lie where the tensor does, or apart from it")
    snprintf(text, FAULT_BYTES, "ArgumentError: tensors %d and %d of the group share memory: in place each would be reduced "
             "twice; leave one out, or give each a result of its own", one, other)
    return False


cdef int group_op(const State* e, const Operation* row, const engine_call* call, Op* op, char* text) noexcept nogil:
    """Fill in the operation of a grouped call; return values as of `call_op`."""
    cdef View view
    cdef Extent* extents = NULL
    cdef uint64_t count = 0
    cdef uint32_t k
    cdef bint fits = True
    if row.reduces:
        extents = <Extent*>malloc(call.count * 2 * sizeof(Extent))
    if (row.reduces and extents == NULL) or not group_begin(op, call.kind, call.count):
        free(extents)
        return ENGINE_CALL_NO_MEMORY
    for k in range(call.count):
        fits = view_member(e, row, call, k, &view, text)
        if not fits:
            break
        group_count(op, k, &view)
        op.members[k].target = <char*>call.tensors[k].target
        if row.reduces:
            count += extents_of(e, row, view.data, op.members[k].target, &view, <int>k, &extents[count])
    fits = fits and lie_apart(extents, count, text)
    free(extents)
    if not fits:
        return ENGINE_CALL_REFUSED
    if not row.reduces:
        return ENGINE_CALL_OK if group_payload(op) else ENGINE_CALL_NO_MEMORY
    fill_reduction(op, call.op, call.prescale, call.postscale)
    op.meta.wire = wire_of_group(call.wire, &op.meta)
    return ENGINE_CALL_OK


cdef bint take_splits(const State* e, const engine_call* call, const View* view, Op* op, char* text) noexcept nogil:
    """Copy the rows per rank that an all-to-all sends into `op.splits`, which the operation then owns.

    Return False if that is impossible: with a `text` if the splits are invalid, without one if memory is missing.
    """
    cdef int64_t left = view.dims[0]
    cdef int r
    for r in range(e.segment.size):
        if call.splits == NULL or call.splits[r] < 0 or call.splits[r] > left:
            return write_argument_error(text, b"splits are a number of rows for each rank, in all no more than the tensor has")
        if call.splits[r] > INT32_MAX:
            return write_argument_error(text, b"splits are 2147483647 rows for each rank at most, since received_splits is int32")
        left -= call.splits[r]
    op.splits = <int64_t*>malloc(<size_t>e.segment.size * sizeof(int64_t))
    if op.splits == NULL:
        return False
    memcpy(op.splits, call.splits, <size_t>e.segment.size * sizeof(int64_t))
    return True


cdef int tensor_op(const State* e, const Operation* row, const engine_call* call, Op* op, char* text) noexcept nogil:
    """Fill in the operation of a call with a single tensor; return values as of `call_op`."""
    cdef View view
    cdef Extent[2] extents
    if not view_member(e, row, call, 0, &view, text):
        return ENGINE_CALL_REFUSED
    if (row.reduces or row.rooted) and not lie_apart(
            extents, extents_of(e, row, view.data, <char*>call.tensors[0].target, &view, 0, extents), text):
        return ENGINE_CALL_REFUSED
    if row.rooted and not has_root(e, call.root, text):
        return ENGINE_CALL_REFUSED
    fill_meta(&op.meta, call.kind, &view)
    op.source, op.nbytes = view.data, view.nbytes
    if row.reduces:
        fill_reduction(op, call.op, call.prescale, call.postscale)
        op.meta.wire = wire_of(call.wire, view.dtype)
    if row.rooted:
        op.meta.root = call.root
    if row.reduces or row.rooted:
        op.target = <char*>call.tensors[0].target
    else:
        op.meta.dims[0] = 0
    if row.uneven or row.parts:
        op.row_bytes = row_bytes(&view)
    if row.says == SAYS_ROWS:
        op.rows = view.dims[0]
    elif row.uneven and not take_splits(e, call, &view, op, text):
        return ENGINE_CALL_REFUSED if text[0] else ENGINE_CALL_NO_MEMORY
    return ENGINE_CALL_OK


cdef int call_op(const State* e, const engine_call* call, Op* op, char* text) noexcept nogil:
    """Fill in the operation of a call.

    Return ENGINE_CALL_OK, ENGINE_CALL_NO_MEMORY, or ENGINE_CALL_REFUSED with the reason in `text`, of FAULT_BYTES.
    """
    cdef const Operation* row
    text[0] = 0
    if call.kind >= KINDS:
        write_argument_error(text, b"there is no operation of that number")
        return ENGINE_CALL_REFUSED
    op.meta.kind = call.kind
    row = operation_of(&op.meta)
    if not fits_operation(row, call, text):
        return ENGINE_CALL_REFUSED
    if not row.moves:
        return ENGINE_CALL_OK
    return group_op(e, row, call, op, text) if call.flags & ENGINE_CALL_GROUP else tensor_op(e, row, call, op, text)
