"""The gradient hooks' knowledge of torch: where a parameter keeps its gradient, and what torch reads to call a hook.

Parameters of other frameworks may use the hooks too, if they keep their gradients as `grad`.
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
    DICT_BYTES = 56                 # bytes of a dictionary object
    KEYS_BYTES = 80                 # bytes of the table's head and its first entry

cdef struct HookPlace:              # the objects that torch touches on its way to a hook; all borrowed
    PyObject* parameter             # the parameter itself
    PyObject* hooks                 # the parameter's dictionary of hooks
    const void* keys                # of that dictionary

cdef inline object gradient_of(parameter):
    """Return a parameter's gradient, or None."""
    return parameter.grad

cdef inline int give_gradient(parameter, gradient) except -1:
    """Set a parameter's gradient."""
    parameter.grad = gradient
    return 0

cdef inline void hook_place(HookPlace* place, hooks) noexcept:
    """Remember the dictionary of hooks in which torch looks the hook up."""
    place.hooks, place.keys = <PyObject*>hooks, keys_of(hooks)

cdef inline void prefetch_place(const HookPlace* place) noexcept:
    """Prefetch what torch touches on its way to a hook."""
    engine_prefetch(place.parameter, sizeof(PyObject))
    engine_prefetch(place.hooks, DICT_BYTES)
    engine_prefetch(place.keys, KEYS_BYTES)
