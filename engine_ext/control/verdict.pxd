"""What has become of a world, in words."""
from engine_ext.control.state cimport State

cdef enum:
    VERDICT_BYTES = 2048        # of the longest text: a reason, and what stands around it

cdef void verdict_describe(State* e, char* text) noexcept nogil
