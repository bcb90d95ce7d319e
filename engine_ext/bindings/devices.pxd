"""Tensors on a GPU: when they are ready, and how streams wait for results."""
from libc.stdint cimport uint64_t

from engine_ext.bindings.view cimport View
from engine_ext.control.state cimport State
from engine_ext.gpu.device cimport device
from engine_ext.operations.op cimport CurrentStream, Op

cdef device* device_of(State* e, int ordinal) except NULL
cdef int expect_same_device(object tensor, const View* view, const View* other, str what) except -1
cdef int mark_ready(State* e, Op* op, object tensor, const View* view) except -1
cdef void release_mark(State* e, Op* op) noexcept nogil
cdef int make_stream_wait(State* e, uint64_t ticket, CurrentStream stream_of, Op* op, bint measured) except -1
cdef bint is_known_passed(const State* e, uint64_t ticket) noexcept nogil
cdef bint has_passed(State* e, uint64_t ticket) noexcept nogil
cdef bint finish_device(State* e, uint64_t ns) noexcept nogil

cdef int set_allocator(Op* op, object room, const View* view) except -1
cdef int serve_allocations(State* e) except -1
cdef void stop_allocations(State* e) noexcept nogil
cdef list list_group_parts(const Op* op, int size, int count)
