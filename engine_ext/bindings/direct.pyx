"""A blocking allreduce in place, without a handle: for a small tensor, each object made here takes as long as the communication."""
from libc.string cimport memset

from engine_ext.bindings.collectives cimport direct_allreduce_op, expect_name
from engine_ext.bindings.handles cimport Handle
from engine_ext.bindings.memory cimport abandon_op, let_go
from engine_ext.bindings.submit cimport submit_when_room
from engine_ext.control.driver cimport Target, driver_note_thread
from engine_ext.operations.op cimport OP_DONE, Op
from engine_ext.platform.atomics cimport load32_acquire
from engine_ext.shared.layout cimport Status


cdef bint reduce_directly(object engine, State* e, object tensor, object name, int op, object prescale,
                          object postscale) except -1:
    """Whether it is done. False: nothing was submitted, and the call has to be made in the usual way, which takes all tensors and
    tells all ranks what is wrong with an argument."""
    cdef Target target
    cdef Handle handle
    cdef Op* brought
    memset(&target, 0, sizeof(Target))
    if type(prescale) is not float or type(postscale) is not float:
        return False
    if name is not None:
        try:
            target.text = expect_name(name, &target.text_bytes)
        except (TypeError, ValueError):
            return False
    brought = direct_allreduce_op(e, tensor, op, prescale, postscale)
    if brought == NULL:
        return False
    driver_note_thread(e)
    try:
        submit_when_room(e, &target, brought, True, name)
    except BaseException:
        abandon_op(e, brought)
        raise
    if load32_acquire(&brought.flags) & OP_DONE and brought.status == Status.OK:
        let_go(e, brought)
        return True
    handle = Handle.__new__(Handle)
    handle.engine, handle.state, handle.output, handle.op = engine, e, tensor, brought
    handle.name = target.label[:target.text_bytes].decode() if name is None else name
    handle.wait()
    return True
