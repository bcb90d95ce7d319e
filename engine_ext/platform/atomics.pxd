from libc.stdint cimport uint32_t, uint64_t

cdef extern from "engine_ext/platform/atomics.h" nogil:
    uint64_t load_relaxed(const uint64_t* p)
    uint64_t load_acquire(const uint64_t* p)
    void store_relaxed(uint64_t* p, uint64_t v)
    void store_release(uint64_t* p, uint64_t v)
    uint32_t load32_relaxed(const uint32_t* p)
    uint32_t load32_acquire(const uint32_t* p)
    void store32_relaxed(uint32_t* p, uint32_t v)
    void store32_release(uint32_t* p, uint32_t v)
    uint64_t add64(uint64_t* p, uint64_t v)
    uint32_t add32(uint32_t* p, uint32_t v)
    uint32_t and32(uint32_t* p, uint32_t v)
    uint32_t or32(uint32_t* p, uint32_t v)
    bint cas(uint64_t* p, uint64_t old, uint64_t v)
    bint cas32(uint32_t* p, uint32_t old, uint32_t v)
    void count_up(uint64_t* p, uint64_t n)
    void* load_pointer(void** p)
    void store_pointer(void** p, void* v)
    void* swap_pointer(void** p, void* v)
    bint cas_pointer(void** p, void* old, void* v)
    enum:
        FENCE_WAKE, FENCE_STAGE, FENCE_SUBMIT, FENCE_ENGINE, FENCE_CALLER, FENCE_ROLE, FENCE_GIVE_BACK, FENCE_WAITER, FENCE_DONE,
        FENCE_TAKE
    void full_fence(int name)
    void spin_pause()
    void yield_processor()
    uint64_t now_ns()
