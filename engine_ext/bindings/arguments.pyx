"""What a collective is called with: held against what the engine can do, and put into an operation."""
from cpython.unicode cimport PyUnicode_AsUTF8AndSize
from libc.math cimport isfinite
from libc.stdint cimport int64_t, uint32_t
from libc.stdio cimport snprintf
from libc.string cimport strlen

from engine_ext.bindings.devices cimport expect_same_device
from engine_ext.bindings.view cimport HOST, View, expect_dense, view_anywhere
from engine_ext.kernels.kernels cimport (
    ENGINE_ADASUM, ENGINE_AVERAGE, ENGINE_BFLOAT16, ENGINE_BOOL, ENGINE_DTYPES, ENGINE_FLOAT16, ENGINE_FLOAT32, ENGINE_FLOAT64,
    ENGINE_SUM,
)
from engine_ext.operations.describe cimport describe_dtypes, dtype_name
from engine_ext.shared.layout cimport LAYOUT_ROWS, NAME_BYTES, WIRE_TUNED, engine_meta

from engine_ext import errors
from engine_ext.errors import ArgumentError, UnsupportedTensorError


cdef const char* expect_name(object name, uint32_t* length) except NULL:
    """The text of an operation's name, which lives as long as that, and its length."""
    cdef Py_ssize_t nbytes
    cdef const char* text = PyUnicode_AsUTF8AndSize(name, &nbytes)
    if not 0 < nbytes <= NAME_BYTES:
        raise ValueError(f"a name has 1 to {NAME_BYTES} bytes of UTF-8; this one has {nbytes}")
    length[0] = <uint32_t>nbytes
    return text


cdef void fill_meta(engine_meta* meta, int kind, const View* view) noexcept nogil:
    cdef int d
    meta.kind, meta.dtype = <unsigned char>kind, view.dtype
    meta.device = view.device != HOST
    meta.layout, meta.ndim = <unsigned char>view.layout, <uint32_t>view.ndim
    for d in range(view.ndim):
        meta.dims[d] = view.dims[d]


cdef int wire_number(object wire, int op) except -1:
    """What `meta.wire` would be for a float32: the dtype that compressed tensors travel in, a name or `tuned`; or None."""
    if wire is None:
        return 0
    if op == ENGINE_ADASUM:
        raise ArgumentError(f"Adasum does not compress tensors; their compression would be {wire}")
    if wire == "float16":
        return ENGINE_FLOAT16 + 1
    if wire == "bfloat16":
        return ENGINE_BFLOAT16 + 1
    if wire == "tuned":
        return WIRE_TUNED
    raise ArgumentError(f"tensors are compressed to float16 or bfloat16, or as tuned, not {wire!r}")


cdef unsigned char wire_of(int chosen, int dtype) noexcept nogil:
    """`meta.wire` of a tensor: only what is wider is compressed."""
    return <unsigned char>chosen if dtype == ENGINE_FLOAT32 or dtype == ENGINE_FLOAT64 else 0


cdef int expect_rows(object tensor, const View* view, str verb) except -1:
    if view.layout != LAYOUT_ROWS:
        expect_dense(tensor, view, "the tensor")
        raise UnsupportedTensorError(f"{verb} rows; make the channels_last tensor row-major first")
    if view.ndim == 0:
        raise UnsupportedTensorError(f"{verb} rows, and a scalar has none; reshape it to one row")
    return 0


cdef bint reduction_fault(bint parts, const View* view, int op, double prescale, double postscale, int size,
                          char* text) noexcept nogil:
    """Whether a reduction cannot be done, of which with `parts` each rank receives its part: `text`, of FAULT_BYTES, then has the
    class of the error, a colon, and the message."""
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
    return text[0] != 0


cdef int expect_reduction(bint parts, const View* view, int op, double prescale, double postscale, int size) except -1:
    cdef char[FAULT_BYTES] text
    if reduction_fault(parts, view, op, prescale, postscale, size, text):
        raise_text(text)
    return 0


cdef int raise_text(const char* text) except -1:
    """Raise what a text says, which begins with the class of engine_ext/errors.py."""
    kind, _, message = (<bytes>text).decode("utf-8", "replace").partition(": ")
    raise getattr(errors, kind)(message)


cdef object same_shape(object tensor, const View* source, object output, View* target, int64_t rows):
    """View the output and hold it against the input, with `rows` rows if it has dimensions."""
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
