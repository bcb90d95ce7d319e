"""A group's tensors, told to ranks that have joined."""
from engine_ext.control.layout cimport engine_entry
from engine_ext.control.state cimport State

cdef bint members_tell(State* e, const engine_entry* entry) noexcept nogil
cdef bint members_heard(State* e, const engine_entry* entry) noexcept nogil
