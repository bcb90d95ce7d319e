"""An allreduce whose sums travel block-scaled between hosts."""
from engine_ext.data.executor cimport Executor
from engine_ext.operations.op cimport Op
from engine_ext.shared.crews cimport Crews
from engine_ext.shared.layout cimport engine_entry, engine_knobs

cdef void choose_blocks(engine_entry* entry, const engine_knobs* knobs, const Crews* crews) noexcept nogil
cdef bint can_be_chosen(const engine_entry* entry) noexcept nogil
cdef bint plan_blocks(Executor* x, Op** batch, const engine_entry* entry) noexcept nogil
