"""Allreduce: every rank gets the ranks' tensors, reduced element by element."""
from libc.stdint cimport uint64_t

from engine_ext.data.executor cimport Executor
from engine_ext.operations.operation cimport Operation
from engine_ext.shared.crews cimport Crews
from engine_ext.shared.layout cimport engine_entry, engine_knobs, engine_meta
from engine_ext.transport.transport cimport Stage

cdef Operation allreduce_row() noexcept
cdef void pack_parts_of_others(Executor* x, uint64_t n, uint64_t begin) noexcept nogil
cdef void offer_parts_to_others(Executor* x, Stage stage, uint64_t n, uint64_t begin) noexcept nogil
cdef void copy_parts_of_others(Executor* x, uint64_t n, uint64_t begin) noexcept nogil

cdef bint carrier_can_sum(const engine_meta* meta) noexcept nogil
cdef bint choose_carrier_sum(engine_entry* entry, const engine_knobs* knobs, const Crews* crews) noexcept nogil
cdef bint carrier_sum_start(Executor* x) noexcept nogil
