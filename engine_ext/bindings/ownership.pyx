"""Who owns an operation of this rank, and what it keeps alive.

Reference counts are touched under the GIL only. An operation holds one reference to what keeps its tensors alive. Whoever made
it frees it; or, when its maker went before the engine had let go of it, the next call does, from the deferred free list
(docs/architecture/protocol.md, I9). Tensors on a GPU may be in use when the engine has let go of the operation: unless the
stream that they were submitted on waits for it, they are kept until the device has passed it, in `graves`.
"""
from cpython.object cimport PyObject
from cpython.ref cimport Py_INCREF, Py_XDECREF

from engine_ext.bindings.devices cimport is_known_passed, unmark
from engine_ext.control.state cimport State
from engine_ext.operations.op cimport OP_ABANDONED, OP_DONE, Op, free_op
from engine_ext.platform.atomics cimport load_pointer, or32, swap_pointer


cdef void keep_alive(Op* op, object owner) noexcept:
    """Keep `owner`, whose memory the operation uses, until the operation is freed; not what it has kept before."""
    cdef PyObject* before = <PyObject*>op.owner
    Py_INCREF(owner)
    op.owner = <void*>owner
    Py_XDECREF(before)


cdef void let_go(State* e, Op* op) noexcept:
    """Free an operation that is done and that nobody holds, now or when the device has passed it. In a forked child, where CUDA
    does not work, it stays."""
    if e.world.device != NULL and e.alive[0] != 1:
        return
    unmark(e, op)
    if op.released or is_known_passed(e, op.ticket):
        free_op(op)
    else:
        op.next, e.graves = e.graves, op


cdef void abandon(State* e, Op* op) noexcept:
    """Nobody waits for `op` any more: it is freed now, or buried when it is done."""
    if or32(&op.flags, OP_ABANDONED) & OP_DONE:
        let_go(e, op)       # else complete() buries it


cdef void bury(State* e) noexcept:
    """Free operations that are done and that nobody holds."""
    cdef Op* op
    cdef Op* after
    if e.graves != NULL:
        op, e.graves = e.graves, NULL
        while op != NULL:
            after = op.next
            let_go(e, op)
            op = after
    if load_pointer(&e.deferred_free) == NULL:
        return
    op = <Op*>swap_pointer(&e.deferred_free, NULL)
    while op != NULL:
        after = op.next
        let_go(e, op)
        op = after
