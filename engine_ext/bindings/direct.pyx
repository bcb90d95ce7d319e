"""A blocking allreduce in place, and a barrier, both without a handle.

They avoid every Python object that they can: making one takes as long as the communication of a small tensor.
"""
from libc.string cimport memset

from engine_ext.bindings.collectives cimport barrier_op, direct_allreduce_op, expect_name
from engine_ext.bindings.handles cimport Handle
from engine_ext.bindings.memory cimport abandon_op, free_when_passed
from engine_ext.bindings.submit cimport catch_up, fail_call, submit_when_room
from engine_ext.control.driver cimport Target, driver_note_thread
from engine_ext.operations.kinds cimport kind_name
from engine_ext.operations.op cimport OP_DONE, Op
from engine_ext.platform.atomics cimport load32_acquire
from engine_ext.shared.layout cimport Status


cdef bint reduce_directly(object engine, State* e, object tensor, object name, int op, object prescale,
                          object postscale) except -1:
    """Try to allreduce a tensor in place; return whether it is done.

    False: nothing was submitted. The caller then has to use the ordinary path, which takes all tensors and tells all ranks what
    is wrong with an argument.
    """
    cdef Target target
    cdef Op* brought
    memset(&target, 0, sizeof(Target))
    if type(prescale) is not float or type(postscale) is not float:
        return False
    if name is not None:
        try:
            target.text = expect_name(name, &target.text_bytes)
        except (TypeError, ValueError):
            return False
    try:
        brought = direct_allreduce_op(e, tensor, op, prescale, postscale)
    except Exception:           # the ordinary path meets the same error
        return False
    if brought == NULL:
        return False
    driver_note_thread(e)
    call(engine, e, brought, &target, tensor, name)
    return True


cdef int meet_directly(object engine, State* e, object name) except -1:
    """Wait until every rank has come to this barrier."""
    cdef Target target
    memset(&target, 0, sizeof(Target))
    if name is not None:
        target.text = expect_name(name, &target.text_bytes)
    call(engine, e, barrier_op(e, name, True), &target, None, name)
    return 0


cdef int call(object engine, State* e, Op* op, Target* target, object output, object name) except -1:
    """Submit an operation and wait for it; raise what goes wrong with it."""
    cdef Handle handle
    try:
        submit_when_room(e, target, op, True, name)
    except BaseException as error:
        if isinstance(error, MemoryError):          # of all other errors the engine itself tells the other ranks
            fail_call(e, kind_name(op.meta.kind).decode(), name, f"MemoryError: {error}")
        abandon_op(e, op)
        raise
    if load32_acquire(&op.flags) & OP_DONE and op.status == Status.OK:
        try:
            if op.rows:                 # a barrier behind which ranks align
                catch_up(e, op.meta.dims)
        finally:
            free_when_passed(e, op)
        return 0
    try:
        handle = Handle.__new__(Handle)
    except BaseException:
        abandon_op(e, op)
        raise
    handle.engine, handle.state, handle.output, handle.op = engine, e, output, op
    handle.name = target.label[:target.text_bytes].decode() if name is None else name
    handle.wait()
    return 0
