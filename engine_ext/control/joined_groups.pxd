"""A group's tensors, told to ranks that have joined."""
from engine_ext.control.state cimport State
from engine_ext.shared.layout cimport engine_entry, member_shape

cdef bint members_tell(State* e, const engine_entry* entry) noexcept nogil
cdef bint members_heard(State* e, const engine_entry* entry) noexcept nogil
