"""An allreduce whose sums pass from host to host."""
from engine_ext.data.executor cimport Executor
from engine_ext.shared.crews cimport Crews
from engine_ext.shared.layout cimport engine_entry, engine_knobs

cdef bint choose_chain(engine_entry* entry, const engine_knobs* knobs, const Crews* crews) noexcept nogil
cdef bint chain_start(Executor* x, int turns) noexcept nogil
