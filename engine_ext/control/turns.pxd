"""Turns of process sets on the GPU: one order, on all ranks, of GPU work for the world and all sets."""
from libc.stdint cimport uint64_t

from engine_ext.control.state cimport State
from engine_ext.gpu.device cimport device_queue
from engine_ext.shared.layout cimport engine_entry

cdef void turns_enter(State* world, device_queue* queue) noexcept nogil
cdef void turns_leave(State* world, device_queue* queue) noexcept nogil
cdef void turns_hand(State* world, device_queue* queue) noexcept nogil
cdef void turns_want(State* world, device_queue* queue) noexcept nogil
cdef void turns_retry(State* world) noexcept nogil
cdef void turns_give(State* world, const engine_entry* entry) noexcept nogil
cdef void turns_look_for_left(State* world) noexcept nogil
cdef bint turns_are_late(State* world, uint64_t seen, uint64_t limit_ns) noexcept nogil
