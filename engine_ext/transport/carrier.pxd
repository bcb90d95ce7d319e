"""The contract of a carrier as Cython sees it; carrier.h says what each function promises."""
from libc.stdint cimport uint32_t, uint64_t

cdef extern from "transport/carrier.h" nogil:
    enum:
        ENGINE_CARRIER_VERSION, ENGINE_CARRIER_MESSAGES
        ENGINE_CARRIER_FAILED, ENGINE_CARRIER_BUSY, ENGINE_CARRIER_DONE
    const char* ENGINE_CARRIER_CAPSULE
    ctypedef struct engine_carrier:
        uint32_t least_bytes
        int (*send)(engine_carrier* carrier, int rank, const void* source, uint32_t nbytes) noexcept nogil
        int (*receive)(engine_carrier* carrier, int rank, void* target, uint32_t nbytes) noexcept nogil
        int (*progress)(engine_carrier* carrier, int rank, uint64_t* sent, uint64_t* arrived) noexcept nogil
        int (*close)(engine_carrier* carrier) noexcept nogil
        void* (*sum_memory)(engine_carrier* carrier, uint64_t nbytes) noexcept nogil
        int (*sum)(engine_carrier* carrier, void* memory, uint64_t count, int item_bytes) noexcept nogil
        int (*summed)(engine_carrier* carrier) noexcept nogil

cdef extern from "transport/carrier.h":
    ctypedef struct engine_carrier_provider:
        uint32_t version
        uint32_t channels
        engine_carrier* (*open)(engine_carrier_provider* provider, uint32_t channel, void* memory, uint64_t nbytes) except? NULL
