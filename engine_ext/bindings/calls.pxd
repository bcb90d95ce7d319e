"""The native call: the declarations of calls.h, and the registration of engines that it can find."""
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

from engine_ext.control.state cimport State

cdef extern from "engine_ext/bindings/calls.h" nogil:
    enum:
        ENGINE_CALL_OK, ENGINE_CALL_REFUSED, ENGINE_CALL_MISMATCH, ENGINE_CALL_DUPLICATE, ENGINE_CALL_JOINED
        ENGINE_CALL_NOT_INITIALIZED, ENGINE_CALL_FORKED, ENGINE_CALL_NO_MEMORY, ENGINE_CALL_FAILED_WORLD
        ENGINE_CALL_GROUP, ENGINE_CALL_UNNAMED, ENGINE_CALL_MARKS_STEP
        ENGINE_CALL_DIMS, ENGINE_CALLS_VERSION
        ENGINE_CALL_FOREVER
    const char* ENGINE_CALLS_CAPSULE
    cdef struct engine_parts:
        pass
    ctypedef struct engine_call_tensor:
        const void* source
        void* target
        int32_t dtype, ndim
        int64_t* dims
    ctypedef struct engine_result:
        int32_t status, ranks
        const char* text
        char* memory
        uint64_t bytes
        const int64_t* rows
        uint32_t count
        engine_parts* parts
    ctypedef void (*Done "engine_done")(void* argument, engine_result* result) noexcept nogil
    ctypedef struct engine_call:
        uint32_t struct_size
        int32_t set
        uint8_t kind, op, wire, flags
        int32_t root
        double prescale, postscale
        const char* name
        uint32_t name_bytes, count
        const engine_call_tensor* tensors
        const int64_t* splits
        Done done
        void* argument
        uint64_t linger_ns
        int32_t optimizer
        const char* fault
    ctypedef struct engine_calls:
        uint32_t struct_size, version
        void (*submit)(const engine_call* call) noexcept nogil
        int (*place)(int32_t set, int32_t* rank, int32_t* size) noexcept nogil
        uint64_t (*part_rows)(const engine_result* result, uint32_t k, int64_t* rows) noexcept nogil
        void (*part_copy)(const engine_result* result, uint32_t k, void* target) noexcept nogil

cdef int calls_admit(State* e, int number) except -1
cdef void calls_dismiss(State* e) noexcept nogil
cdef bint calls_settle(State* e, uint64_t ns) noexcept nogil
