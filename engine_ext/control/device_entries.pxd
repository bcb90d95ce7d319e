"""Entries of tensors on a GPU: handed to the CUDA thread, and completed when it has enqueued them."""
from engine_ext.control.state cimport State
from engine_ext.gpu.device cimport device
from engine_ext.shared.layout cimport engine_entry

cdef bint give_to_cuda_thread(State* e, const engine_entry* entry) noexcept nogil
cdef void use_device(State* e, device* d) noexcept nogil
cdef void stop_device(State* e) noexcept nogil
