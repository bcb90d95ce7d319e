"""Handlers of the frames that arrive over trunks."""
from engine_ext.hosts.relay cimport Relay

cdef void frame_handlers_open(Relay* relay) noexcept nogil
