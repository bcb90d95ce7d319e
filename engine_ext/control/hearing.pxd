"""What comes over trunks."""
from engine_ext.control.relay cimport Relay

cdef void hearing_open(Relay* relay) noexcept nogil
