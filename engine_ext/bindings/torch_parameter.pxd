"""All that the gradient hooks know of torch: where a parameter keeps its gradient, and what torch reads to call a hook.

Parameters of another framework may use the hooks, too, if they keep their gradients as `grad`.
"""
from cpython.object cimport PyObject

cdef extern from "platform/cpu.h" nogil:
    void engine_prefetch(const void* memory, size_t nbytes)

cdef extern from *:
    """
    #define keys_of(mapping) ((const void *)((PyDictObject *)(mapping))->ma_keys)
    """
    const void* keys_of(object mapping)

cdef enum:
    DICT_BYTES = 56
    KEYS_BYTES = 80                 # the table's head and its first entry

cdef struct HookPlace:              # what torch touches on its way to a hook; all of it borrowed
    PyObject* parameter
    PyObject* hooks                 # the parameter's dictionary of hooks
    const void* keys                # of that dictionary

cdef inline object gradient_of(parameter):
    return parameter.grad

cdef inline int give_gradient(parameter, gradient) except -1:
    parameter.grad = gradient
    return 0

cdef inline void hook_place(HookPlace* place, hooks) noexcept:
    place.hooks, place.keys = <PyObject*>hooks, keys_of(hooks)

cdef inline void prefetch_place(const HookPlace* place) noexcept:
    engine_prefetch(place.parameter, sizeof(PyObject))
    engine_prefetch(place.hooks, DICT_BYTES)
    engine_prefetch(place.keys, KEYS_BYTES)
