"""Items that only move: what each rank gets of every tensor."""
from engine_ext.control.state cimport State
from engine_ext.gpu.device cimport device_item
from engine_ext.shared.layout cimport engine_entry

cdef bint tells_numbers(const State* e, const engine_entry* entry) noexcept nogil
cdef bint numbers_heard(State* e, const engine_entry* entry) noexcept nogil
cdef bint numbers_tell(State* e, const engine_entry* entry) noexcept nogil
cdef bint add_parcels(const State* e, device_item* item, const engine_entry* entry) noexcept nogil
