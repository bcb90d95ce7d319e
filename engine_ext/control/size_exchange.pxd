"""Exchange of sizes between ranks before an entry is planned."""
from engine_ext.control.state cimport State
from engine_ext.gpu.device cimport device_item
from engine_ext.shared.layout cimport engine_entry

cdef bint exchanges_sizes(const State* e, const engine_entry* entry) noexcept nogil
cdef bint sizes_receive(State* e, const engine_entry* entry) noexcept nogil
cdef bint sizes_send(State* e, const engine_entry* entry) noexcept nogil
cdef bint add_moves(const State* e, device_item* item, const engine_entry* entry) noexcept nogil

cdef bint members_send(State* e, const engine_entry* entry) noexcept nogil
cdef bint members_receive(State* e, const engine_entry* entry) noexcept nogil
