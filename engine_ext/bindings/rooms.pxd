"""Room for results on a GPU whose size only their entry tells."""
from engine_ext.bindings.view cimport View
from engine_ext.control.state cimport State
from engine_ext.operations.op cimport Op

cdef int expect_room(Op* op, object room, const View* view) except -1
cdef int make_rooms(State* e) except -1
cdef void close_rooms(State* e) noexcept nogil
cdef list parts_in_rooms(const Op* op, int size, int count)
