"""Operations of Python are made and freed with the GIL held: each holds a reference to what keeps its tensors alive. Those of
native calls hold none, and need no GIL."""
from cpython.object cimport PyObject
from cpython.ref cimport Py_XDECREF
from libc.stdlib cimport calloc, free


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
