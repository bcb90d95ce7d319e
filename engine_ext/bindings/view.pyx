"""Borrow a view of any tensor through its type's DLPack exchange table, the buffer protocol, or a DLPack capsule.

The fastest of these that an object offers is used. The functions return an object that keeps the memory in place, or None if a
reference to the tensor itself is enough.
"""
from cpython.buffer cimport PyBUF_FORMAT, PyBUF_STRIDES, Py_buffer, PyBuffer_Release, PyObject_GetBuffer
from cpython.memoryview cimport PyMemoryView_FromObject, PyMemoryView_GET_BUFFER
from cpython.object cimport PyObject
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid
from libc.stdint cimport uint16_t, uint32_t
from libc.string cimport memset

from engine_ext.kernels.kernels cimport (
    ENGINE_ALL_DTYPES, ENGINE_BFLOAT16, ENGINE_BOOL, ENGINE_COMPLEX32, ENGINE_COMPLEX64, ENGINE_COMPLEX128, ENGINE_DTYPES,
    ENGINE_FLOAT8_E4M3FN, ENGINE_FLOAT8_E4M3FNUZ, ENGINE_FLOAT8_E5M2, ENGINE_FLOAT8_E5M2FNUZ, ENGINE_FLOAT8_E8M0FNU,
    ENGINE_FLOAT16, ENGINE_FLOAT32, ENGINE_FLOAT64, ENGINE_INT8, ENGINE_INT16, ENGINE_INT32, ENGINE_INT64, ENGINE_UINT8,
    ENGINE_UINT16, ENGINE_UINT32, ENGINE_UINT64,
)
from engine_ext.operations.kinds cimport describe_dtypes, dtype_name
from engine_ext.shared.layout cimport LAYOUT_CHANNELS_LAST, LAYOUT_CHANNELS_LAST_3D, LAYOUT_ROWS, MAX_DIMS
from engine_ext.shared.rows cimport bounded_product

from engine_ext.errors import UnsupportedTensorError

cdef extern from "Python.h":
    unsigned long Py_TPFLAGS_HEAPTYPE

cdef extern from "engine_ext/bindings/dlpack.h":
    enum:
        DL_CPU, DL_CUDA, DL_INT, DL_UINT, DL_FLOAT, DL_BFLOAT, DL_COMPLEX, DL_BOOL
        DL_E4M3FN, DL_E4M3FNUZ, DL_E5M2, DL_E5M2FNUZ, DL_E8M0FNU
    struct dl_device:
        int32_t type, id
    struct dl_dtype:
        uint8_t code, bits
        uint16_t lanes
    ctypedef struct dl_tensor:
        void* data
        dl_device device
        int32_t ndim
        dl_dtype dtype
        int64_t* shape
        int64_t* strides
        uint64_t byte_offset
    struct dl_version:
        uint32_t major
    ctypedef struct dl_managed:
        dl_tensor tensor
    ctypedef struct dl_managed_versioned:
        dl_version version
        uint64_t flags
        dl_tensor tensor
    ctypedef struct dl_exchange_api:
        dl_version version
        dl_exchange_api* previous
        int (*borrow)(void* tensor, dl_tensor* out) except -1
        CurrentStream current_stream

cdef enum:
    KNOWN_TYPES = 8
    NAMES_BYTES = 512           # room for a list of all dtypes, in bytes

# Types whose exchange table was found: looking it up in a type costs more than the view itself. They are kept forever.
cdef (PyObject*)[KNOWN_TYPES] known_types
cdef (dl_exchange_api*)[KNOWN_TYPES] known_tables
cdef list known_references = []
# NumPy's array type, once an array was seen; else NULL. It has no table and can get none, since it is no heap type. Its arrays
# keep their memory as long as they are referenced.
cdef PyObject* array_type = NULL
# Types with an exchange table whose tensors may be written to. For each a function returns whether a tensor's elements are the
# negatives of what lies in memory.
cdef list direct_types = []
cdef list direct_negations = []


cdef dl_exchange_api* exchange_table(object tensor):
    """Return the exchange table of a tensor's type, or NULL."""
    global array_type
    cdef type kind = type(tensor)
    cdef dl_exchange_api* table
    cdef object capsule
    cdef int k
    for k in range(len(known_references)):
        if known_types[k] == <PyObject*>kind:
            return known_tables[k]
    capsule = getattr(kind, "__dlpack_c_exchange_api__", None)
    if capsule is None or not PyCapsule_IsValid(capsule, b"dlpack_exchange_api"):
        if capsule is None and not kind.__flags__ & Py_TPFLAGS_HEAPTYPE and (
                kind.__module__, kind.__name__) == ("numpy", "ndarray"):
            array_type = <PyObject*>kind        # lives as long as the process
        return NULL
    table = <dl_exchange_api*>PyCapsule_GetPointer(capsule, b"dlpack_exchange_api")
    while table != NULL and table.version.major != 1:
        table = table.previous
    if table != NULL and table.borrow != NULL and len(known_references) < KNOWN_TYPES:
        known_types[len(known_references)] = <PyObject*>kind
        known_tables[len(known_references)] = table
        known_references.append(kind)
    return table


cdef int refuse_tensor(object tensor, str why) except -1:
    """Raise UnsupportedTensorError for a tensor, with the reason."""
    raise UnsupportedTensorError(
        f"{type(tensor).__module__}.{type(tensor).__qualname__} cannot be communicated: {why}"
    )


cdef str dtype_names(int first, int end):
    """Return the names of the dtypes from `first` up to `end`, for an error."""
    cdef char[NAMES_BYTES] text
    describe_dtypes(first, end, text, NAMES_BYTES)
    return text.decode()


cdef int refuse_dtype(object tensor, object fallback) except -1:
    """Raise UnsupportedTensorError for a tensor's dtype; `fallback` names the dtype if the tensor does not."""
    return refuse_tensor(
        tensor,
        f"its dtype {getattr(tensor, 'dtype', fallback)} is none that the engine takes; convert it first. Every operation takes "
        f"{dtype_names(0, ENGINE_DTYPES)}; broadcast, allgather and alltoall also take "
        f"{dtype_names(ENGINE_DTYPES, ENGINE_ALL_DTYPES)}",
    )


cdef int expect_reducible(const View* view, str what) except -1:
    """Raise UnsupportedTensorError for a dtype without reduction kernels."""
    if view.dtype >= ENGINE_DTYPES:
        raise UnsupportedTensorError(
            f"{what} has the dtype {dtype_name(view.dtype).decode()}, which broadcast, allgather and alltoall move, but nothing "
            f"reduces; convert it to one of {dtype_names(0, ENGINE_DTYPES)}"
        )
    return 0


cdef int refuse_memory(object tensor) except -1:
    """Raise for a tensor with elements but without memory. Its NULL address would mean *absent* to the engine."""
    if hasattr(tensor, "to_local"):
        return refuse_tensor(tensor, "it is spread over a device mesh and has no memory of its own; communicate what this rank "
                                     "holds of it, its to_local()")
    return refuse_tensor(tensor, "it has a shape and no memory: it is a stand-in such as a FakeTensor, or its storage was freed, "
                                 "as FSDP does between steps; communicate it while it is materialized")


cdef int dtype_of_dlpack(object tensor, const dl_tensor* t) except -1:
    """Return the engine's number of a DLPack dtype; raise if there is none."""
    cdef int code = t.dtype.code, bits = t.dtype.bits
    cdef int dtype = -1
    if t.dtype.lanes != 1:
        return refuse_dtype(tensor, "?")
    if code == DL_FLOAT:
        dtype = ENGINE_FLOAT32 if bits == 32 else ENGINE_FLOAT64 if bits == 64 else ENGINE_FLOAT16 if bits == 16 else -1
    elif code == DL_BFLOAT:
        dtype = ENGINE_BFLOAT16 if bits == 16 else -1
    elif code == DL_INT:
        dtype = signed_of(bits)
    elif code == DL_UINT:
        dtype = unsigned_of(bits)
    elif code == DL_BOOL:
        dtype = ENGINE_BOOL if bits == 8 else -1
    elif code == DL_COMPLEX:
        dtype = ENGINE_COMPLEX64 if bits == 64 else ENGINE_COMPLEX128 if bits == 128 else ENGINE_COMPLEX32 if bits == 32 else -1
    elif bits == 8:
        dtype = float8_of(code)
    return refuse_dtype(tensor, "?") if dtype < 0 else dtype


cdef int signed_of(int bits) noexcept:
    """Return the signed integer dtype of a width in bits, or -1."""
    return ENGINE_INT64 if bits == 64 else ENGINE_INT32 if bits == 32 else ENGINE_INT16 if bits == 16 else \
        ENGINE_INT8 if bits == 8 else -1


cdef int unsigned_of(int bits) noexcept:
    """Return the unsigned integer dtype of a width in bits, or -1."""
    return ENGINE_UINT8 if bits == 8 else ENGINE_UINT16 if bits == 16 else ENGINE_UINT32 if bits == 32 else \
        ENGINE_UINT64 if bits == 64 else -1


cdef int float8_of(int code) noexcept:
    """Return the float8 dtype of a DLPack type code, or -1."""
    return ENGINE_FLOAT8_E4M3FN if code == DL_E4M3FN else ENGINE_FLOAT8_E4M3FNUZ if code == DL_E4M3FNUZ else \
        ENGINE_FLOAT8_E5M2 if code == DL_E5M2 else ENGINE_FLOAT8_E5M2FNUZ if code == DL_E5M2FNUZ else \
        ENGINE_FLOAT8_E8M0FNU if code == DL_E8M0FNU else -1


cdef int dtype_of_buffer(object tensor, const Py_buffer* buffer) except -1:
    """Return the engine's number of a buffer's format; raise if there is none."""
    cdef bytes form
    cdef int dtype = -1
    if buffer.format != NULL and buffer.format[0] == c"f" and buffer.format[1] == 0:        # the most frequent one
        return ENGINE_FLOAT32
    form = buffer.format if buffer.format != NULL else b"B"
    form = form.lstrip(b"@=<" if ENDIAN_LITTLE else b"@=>")
    if form == b"f":
        dtype = ENGINE_FLOAT32
    elif form == b"d":
        dtype = ENGINE_FLOAT64
    elif form == b"e":
        dtype = ENGINE_FLOAT16
    elif form == b"?":
        dtype = ENGINE_BOOL
    elif form in (b"b", b"h", b"i", b"l", b"q"):
        dtype = signed_of(8 * <int>buffer.itemsize)
    elif form in (b"B", b"H", b"I", b"L", b"Q"):
        dtype = unsigned_of(8 * <int>buffer.itemsize)
    elif form == b"Zf":
        dtype = ENGINE_COMPLEX64
    elif form == b"Zd":
        dtype = ENGINE_COMPLEX128
    return refuse_dtype(tensor, form.decode()) if dtype < 0 else dtype

cdef extern from *:
    """
    #define ENDIAN_LITTLE (__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__)
    """
    bint ENDIAN_LITTLE


cdef bint is_dense(const int64_t* dims, const int64_t* strides, const int* order, int ndim) noexcept:
    """Return whether the elements are contiguous in memory, with the dimensions nested in `order`, the last varying fastest;
    NULL: as they come. Strides are in elements."""
    cdef int64_t expected = 1
    cdef int k = ndim - 1, d
    while k >= 0:
        d = order[k] if order != NULL else k
        if dims[d] != 1:
            if strides[d] != expected:
                return False
            expected *= dims[d]
        k -= 1
    return True


cdef int* CHANNELS_LAST = [0, 2, 3, 1]          # dimensions, that with the smallest stride last
cdef int* CHANNELS_LAST_3D = [0, 2, 3, 4, 1]


cdef int set_shape(View* view, int ndim, const int64_t* dims, const int64_t* strides, int itemsize) except -1:
    """Set shape, size and layout of a view, whose `data` and `dtype` are set. Strides are in elements; NULL: row-major."""
    cdef int k
    view.count, view.layout = 1, LAYOUT_ROWS
    memset(view.dims, 0, sizeof(view.dims))
    for k in range(ndim):
        view.count *= <uint64_t>dims[k]
    view.itemsize, view.nbytes = itemsize, view.count * <uint64_t>itemsize
    view.ndim = min(ndim, <int>MAX_DIMS)
    for k in range(ndim):
        if k < MAX_DIMS:
            view.dims[k] = dims[k]
        else:
            # dimensions beyond the last entry are merged into it
            view.dims[MAX_DIMS - 1] = <int64_t>bounded_product(<uint64_t>view.dims[MAX_DIMS - 1], <uint64_t>dims[k])
    if strides == NULL or view.count == 0 or is_dense(dims, strides, NULL, ndim):
        view.layout = LAYOUT_ROWS
    elif ndim == 4 and is_dense(dims, strides, CHANNELS_LAST, 4):
        view.layout = LAYOUT_CHANNELS_LAST
    elif ndim == 5 and is_dense(dims, strides, CHANNELS_LAST_3D, 5):
        view.layout = LAYOUT_CHANNELS_LAST_3D
    else:
        view.layout = SCATTERED
    if view.dtype < ENGINE_DTYPES and <size_t>view.data % <size_t>itemsize and view.count:     # others may lie anywhere
        view.layout = MISALIGNED
    return 0


cdef int from_dlpack(object tensor, const dl_tensor* t, View* view) except -1:
    """Fill `view` from a DLPack tensor; raise for another device, dtype or missing memory."""
    view.device = HOST
    if t.device.type == DL_CUDA:
        view.device = 1 + t.device.id
    elif t.device.type != DL_CPU:
        refuse_tensor(tensor, f"it is on device {getattr(tensor, 'device', t.device.type)}, and only memory of the CPU and of "
                              "CUDA devices is supported; move it with .cpu()")
    view.dtype = <uint8_t>dtype_of_dlpack(tensor, t)
    view.data = <char*>t.data + t.byte_offset
    set_shape(view, t.ndim, t.shape, t.strides, (t.dtype.bits + 7) // 8)
    if t.data == NULL and view.count:
        refuse_memory(tensor)
    return 0


cdef int from_buffer(object tensor, const Py_buffer* buffer, View* view) except -1:
    """Fill `view` from a buffer; raise for an unsupported dtype or missing memory."""
    cdef int64_t[64] strides
    cdef int k
    if buffer.ndim > 64:
        refuse_tensor(tensor, f"it has {buffer.ndim} dimensions, more than 64")
    view.dtype = <uint8_t>dtype_of_buffer(tensor, buffer)
    view.data, view.readonly = <char*>buffer.buf, buffer.readonly
    if buffer.strides != NULL:
        for k in range(buffer.ndim):
            strides[k] = buffer.strides[k] // buffer.itemsize
    set_shape(view, buffer.ndim, <const int64_t*>buffer.shape, strides if buffer.strides != NULL else NULL, <int>buffer.itemsize)
    if buffer.strides != NULL:
        for k in range(buffer.ndim):
            if buffer.strides[k] % buffer.itemsize:
                view.layout = SCATTERED
    if buffer.buf == NULL and view.count:
        refuse_memory(tensor)
    return 0


cdef object view_of(object tensor, View* view):
    """Fill `view` of a tensor in host memory. Return an object to keep alive beside the tensor itself, or None."""
    cdef object keeper = view_anywhere(tensor, view)
    if view.device != HOST:
        refuse_tensor(tensor, f"it is on device {getattr(tensor, 'device', f'cuda:{view.device - 1}')}, and this "
                              "is done with memory of the host alone; move it with .cpu()")
    return keeper


cdef bint view_of_array(object array, View* view) except -1:
    """Fill `view` of a NumPy array, whose reference keeps its memory. Return False for a dtype without a buffer format."""
    cdef Py_buffer buffer
    try:
        PyObject_GetBuffer(array, &buffer, PyBUF_FORMAT | PyBUF_STRIDES)
    except (ValueError, BufferError):
        return False
    try:
        from_buffer(array, &buffer, view)
    finally:
        PyBuffer_Release(&buffer)
    return True


cdef int add_direct_type(object kind, object is_negated) except -1:
    """Allow tensors of exactly type `kind` to be viewed directly.

    `is_negated` says whether the elements of a tensor are the negatives of what lies in memory; such a tensor is excluded.
    """
    if kind not in direct_types:
        direct_types.append(kind)
        direct_negations.append(is_negated)
    return 0


cdef bint view_directly(object tensor, View* view) except -1:
    """Fill `view` of a row-major, writable host tensor that a reference keeps in place; return whether the tensor is one.

    False also if that is unknown. The ordinary path copies tensors of other layouts, and all ranks have to agree on the layout.
    """
    cdef object keeper, kind = type(tensor)
    cdef Py_ssize_t k
    if <PyObject*>kind != array_type:
        for k in range(len(direct_types)):
            if direct_types[k] is kind:
                break
        else:
            return False
        if direct_negations[k](tensor):
            return False
    try:
        keeper = view_anywhere(tensor, view)
    except UnsupportedTensorError:
        return False
    return keeper is None and view.layout == LAYOUT_ROWS and not view.readonly and view.device == HOST


cdef object view_anywhere(object tensor, View* view):
    """Fill `view` of a tensor in host or GPU memory. Return an object to keep alive beside the tensor itself, or None."""
    cdef dl_exchange_api* table
    cdef dl_tensor borrowed
    cdef object keeper, kind = type(tensor)
    view.readonly, view.device, view.stream_of = False, HOST, NULL
    if <PyObject*>kind == array_type and view_of_array(tensor, view):
        return None
    table = exchange_table(tensor)
    if table != NULL and table.borrow != NULL:
        try:
            table.borrow(<void*>tensor, &borrowed)
        except (BufferError, RuntimeError) as cause:    # sparse, conjugated or without memory: the type's message says which
            refuse_tensor(tensor, str(cause).partition("\n")[0])
        from_dlpack(tensor, &borrowed, view)
        view.stream_of = table.current_stream
        return None
    try:
        keeper = PyMemoryView_FromObject(tensor)
    except TypeError:
        keeper = None
    except (ValueError, BufferError) as cause:
        keeper = view_of_bits(tensor, view)
        if keeper is not None:
            return keeper
        refuse_tensor(tensor, str(cause).partition("\n")[0])
    if keeper is not None:
        from_buffer(tensor, PyMemoryView_GET_BUFFER(keeper), view)
        return keeper
    if not hasattr(tensor, "__dlpack__"):
        refuse_tensor(tensor, "it speaks neither DLPack nor the buffer protocol; wrap it with numpy.asarray or torch.as_tensor")
    try:
        keeper = tensor.__dlpack__()
    except (BufferError, RuntimeError) as cause:        # likewise; which of the two is raised depends on the version
        refuse_tensor(tensor, str(cause).partition("\n")[0])
    view_of_capsule(tensor, keeper, view)
    if view.device != HOST:
        refuse_tensor(tensor, "it is on a GPU, and its framework does not tell by DLPack's exchange table on which stream it "
                              "works, as PyTorch does from 2.10 on; use a newer one, or move it with .cpu()")
    return keeper


# dtypes that packages such as ml_dtypes add to NumPy. The buffer protocol has no letters for them.
cdef dict ADDED_TO_NUMPY = {
    dtype_name(dtype).decode(): dtype for dtype in (
        ENGINE_BFLOAT16, ENGINE_FLOAT8_E4M3FN, ENGINE_FLOAT8_E4M3FNUZ, ENGINE_FLOAT8_E5M2, ENGINE_FLOAT8_E5M2FNUZ,
        ENGINE_FLOAT8_E8M0FNU,
    )
}


cdef object view_of_bits(object tensor, View* view):
    """Fill `view` of a NumPy array with an added dtype, through a view of it as integers. Return the object to keep alive, or
    None for any other tensor."""
    cdef object dtype = ADDED_TO_NUMPY.get(str(getattr(tensor, "dtype", "")))
    cdef object keeper
    if dtype is None or not hasattr(tensor, "__array_interface__"):
        return None
    keeper = PyMemoryView_FromObject(tensor.view(f"u{tensor.dtype.itemsize}"))
    from_buffer(tensor, PyMemoryView_GET_BUFFER(keeper), view)
    view.dtype = <uint8_t><int>dtype
    return keeper


cdef int view_of_capsule(object tensor, object capsule, View* view) except -1:
    """Fill `view` from a DLPack capsule without consuming it: the capsule releases the memory when it is dropped."""
    cdef dl_managed_versioned* versioned
    if PyCapsule_IsValid(capsule, b"dltensor_versioned"):
        versioned = <dl_managed_versioned*>PyCapsule_GetPointer(capsule, b"dltensor_versioned")
        if versioned.version.major != 1:
            refuse_tensor(tensor, f"it speaks DLPack {versioned.version.major}, this build speaks 1")
        view.readonly = versioned.flags & 1 != 0
        return from_dlpack(tensor, &versioned.tensor, view)
    return from_dlpack(tensor, &(<dl_managed*>PyCapsule_GetPointer(capsule, b"dltensor")).tensor, view)


cdef int expect_dense(object tensor, const View* view, str role) except -1:
    """Raise for a view whose elements do not fill their memory in an order that all ranks can share."""
    if view.layout == MISALIGNED:
        refuse_tensor(
            tensor, f"{role} does not begin at a multiple of its elements' size ({dtype_name(view.dtype).decode()}); copy it")
    if view.layout == SCATTERED:
        refuse_tensor(tensor, f"{role} is not contiguous ({dtype_name(view.dtype).decode()}); make it contiguous first")
    return 0
