"""The reduction kernels of kernels.h. All functions may be called without the GIL, and raise nothing."""
from libc.stdint cimport int64_t, uint8_t

cdef extern from "kernels/kernels.h" nogil:
    enum:  # engine_dtype
        ENGINE_FLOAT16
        ENGINE_BFLOAT16
        ENGINE_FLOAT32
        ENGINE_FLOAT64
        ENGINE_INT8
        ENGINE_UINT8
        ENGINE_INT16
        ENGINE_UINT16
        ENGINE_INT32
        ENGINE_INT64
        ENGINE_BOOL
        ENGINE_DTYPES
        ENGINE_UINT32
        ENGINE_UINT64
        ENGINE_COMPLEX32
        ENGINE_COMPLEX64
        ENGINE_COMPLEX128
        ENGINE_FLOAT8_E4M3FN
        ENGINE_FLOAT8_E4M3FNUZ
        ENGINE_FLOAT8_E5M2
        ENGINE_FLOAT8_E5M2FNUZ
        ENGINE_FLOAT8_E8M0FNU
        ENGINE_ALL_DTYPES

    enum:  # engine_op
        ENGINE_SUM
        ENGINE_AVERAGE
        ENGINE_MIN
        ENGINE_MAX
        ENGINE_PRODUCT
        ENGINE_OPS
        ENGINE_ADASUM

    enum:  # engine_level
        ENGINE_PLAIN
        ENGINE_AVX2
        ENGINE_AVX512
        ENGINE_LEVELS

    enum:
        ENGINE_NO_SOURCE
        ENGINE_EVERY_SOURCE
        ENGINE_INNER_LANES
        ENGINE_BLOCK

    ctypedef struct engine_accumulation:
        size_t size
        void (*widen)(void *acc, const void *src, size_t n) noexcept nogil
        void (*combine)(void *acc, const void *a, const void *b, size_t n) noexcept nogil
        void (*fold)(void *acc, const void *src, size_t n) noexcept nogil
        void (*finish)(void *dst, const void *acc, double divisor, double factor, size_t n) noexcept nogil

    ctypedef struct engine_dtype_kernels:
        size_t size
        void (*scale)(void *dst, const void *src, double factor, size_t n) noexcept nogil
        engine_accumulation ops[5]

    ctypedef struct engine_reduction:
        int dtype
        int op
        int tensor
        int count
        int unscaled
        int copies
        int streaming
        double prescale
        double divisor
        double postscale

    ctypedef struct engine_kernels:
        void (*copy)(void *dst, const void *src, size_t bytes) noexcept nogil
        void (*copy_streaming)(void *dst, const void *src, size_t bytes) noexcept nogil
        void (*pack)(
            int dtype, int tensor, double prescale, int streaming, void *dst, const void *src, size_t n
        ) noexcept nogil
        void (*unpack)(int dtype, int tensor, void *dst, const void *src, size_t n) noexcept nogil
        void (*reduce)(
            const engine_reduction *r, const void *const *sources, void *const *destinations, size_t n
        ) noexcept nogil
        void (*reduce_onward)(
            const engine_reduction *r, const void *before, const void *const *sources, void *after, size_t n
        ) noexcept nogil
        void (*reduce_last)(
            const engine_reduction *r, const void *before, const void *const *sources, void *const *destinations, size_t n
        ) noexcept nogil
        engine_dtype_kernels types[11]      # ENGINE_DTYPES
        void (*inner)(int dtype, double *lanes, const void *const *rows, int count, size_t n) noexcept nogil
        void (*weigh)(
            int dtype, void *dst, const void *const *rows, const double *weights, int count, size_t n
        ) noexcept nogil
        void (*encode)(uint8_t *scales, uint8_t *codes, const float *src, size_t n) noexcept nogil
        void (*decode)(float *dst, const uint8_t *scales, const uint8_t *codes, size_t n) noexcept nogil
        void (*decode_add)(float *acc, const uint8_t *scales, const uint8_t *codes, size_t n) noexcept nogil
        void (*to_float)(int dtype, double factor, float *dst, const void *src, size_t n) noexcept nogil
        void (*from_float)(int dtype, void *dst, const float *src, size_t n) noexcept nogil

    const char** ENGINE_DTYPE_NAMES
    const char** ENGINE_OP_NAMES

    int64_t dtype_bytes(int dtype)
    const engine_kernels *engine_kernels_get(int level) noexcept
    int engine_kernels_best() noexcept
    const char *engine_kernels_name(int level) noexcept
    int engine_kernels_level(const char *name) noexcept
    int engine_reduction_check(const engine_reduction *r) noexcept
