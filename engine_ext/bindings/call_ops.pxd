"""Build the operation that a native call submits from the call's arguments."""
from engine_ext.bindings.calls cimport engine_call
from engine_ext.control.state cimport State
from engine_ext.operations.op cimport Op

cdef int call_op(const State* e, const engine_call* call, Op* op, char* text) noexcept nogil
