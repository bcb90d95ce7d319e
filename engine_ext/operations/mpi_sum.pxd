"""An allreduce that MPI makes."""
from engine_ext.data.executor cimport Executor
from engine_ext.shared.crews cimport Crews
from engine_ext.shared.layout cimport engine_entry, engine_knobs, engine_meta

cdef bint mpi_sums(const engine_meta* meta) noexcept nogil
cdef bint choose_mpi_sum(engine_entry* entry, const engine_knobs* knobs, const Crews* crews) noexcept nogil
cdef bint mpi_sum_start(Executor* x) noexcept nogil
