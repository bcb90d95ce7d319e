"""An operation of one rank, from its making to its end.

Reference counts are touched under the GIL only. An operation holds one reference to what keeps its tensors alive. Whoever made
it frees it; or, when its maker went before the engine had let go of it, the next call does, from the graveyard
(docs/architecture/protocol.md, I9).
"""
from cpython.object cimport PyObject
from cpython.ref cimport Py_INCREF, Py_XDECREF
from libc.stdlib cimport calloc, free

from engine_ext.bindings.memory cimport Memory
from engine_ext.control.state cimport State
from engine_ext.control.table cimport OP_ABANDONED, OP_DONE, Op
from engine_ext.platform.atomics cimport load_pointer, or32, swap_pointer


cdef Op* new_op() except NULL:
    """An operation that its maker alone owns until it is brought."""
    cdef Op* op = <Op*>calloc(1, sizeof(Op))
    if op == NULL:
        raise MemoryError("no memory for an operation")
    op.meta.shared, op.meta.prescale, op.meta.postscale = -1, 1.0, 1.0
    op.flags = OP_DONE
    return op


cdef void keep_alive(Op* op, object owner) noexcept:
    """Keep `owner`, whose memory the operation uses, until the operation is freed; not what it has kept before."""
    cdef PyObject* before = <PyObject*>op.owner
    Py_INCREF(owner)
    op.owner = <void*>owner
    Py_XDECREF(before)


cdef Memory take_memory(Op* op):
    """The result that the engine has allocated, as an object that owns it."""
    cdef Memory memory = Memory.__new__(Memory)
    memory.data, memory.nbytes = op.memory, op.memory_bytes
    op.memory = NULL
    return memory


cdef void free_op(Op* op) noexcept:
    """The GIL is held and the engine has let go of `op`."""
    Py_XDECREF(<PyObject*>op.owner)
    free(op.memory)
    free(op.row_counts)
    free(op.splits)
    free(op.members)
    free(op.text)
    free(op)


cdef void abandon(Op* op) noexcept:
    """Nobody waits for `op` any more: it is freed now, or buried when it is done."""
    if or32(&op.flags, OP_ABANDONED) & OP_DONE:
        free_op(op)         # else complete() buries it


cdef void bury(State* e) noexcept:
    """Free operations that are done and that nobody holds."""
    cdef Op* op
    cdef Op* after
    if load_pointer(&e.graveyard) == NULL:
        return
    op = <Op*>swap_pointer(&e.graveyard, NULL)
    while op != NULL:
        after = op.next
        free_op(op)
        op = after
