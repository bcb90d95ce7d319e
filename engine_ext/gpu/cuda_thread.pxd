"""The CUDA thread's thread, as its owner sees it (cuda_thread.h)."""
from libc.stdint cimport uint32_t, uint64_t

from engine_ext.gpu.device cimport DEVICE_WHY, device, device_part, device_queue, device_row


cdef extern from "engine_ext/gpu/cuda_thread.h" nogil:
    enum:
        CUDA_THREAD_FUNCTIONS
        CUDA_THREAD_KERNELS
        CUDA_THREAD_DTYPES
        CUDA_THREAD_IDENTIFY
        CUDA_THREAD_PREPARE
        CUDA_THREAD_NAME
        CUDA_THREAD_CONNECT
        CUDA_THREAD_CLOSE
        COMMUNICATOR_BEGUN
        COMMUNICATOR_CONNECTED
        COMMUNICATOR_DESTROYED
        COMMUNICATOR_FAILED

    ctypedef struct cuda_thread_function:
        const char* name
        int since

    ctypedef struct cuda_thread_failure:
        const char* call
        int code
        char[64] name
        char[2048] text

    ctypedef struct cuda_thread_identity:
        int driver
        int devices
        char[128] name
        char[32] pci
        unsigned char[16] uuid

    ctypedef struct cuda_thread_functions:
        pass

    ctypedef struct ncclUniqueId:
        char[128] internal

    ctypedef struct cuda_thread_kernels:
        int[11][11] pack
        int[11][11] unpack
        int pack_bytes
        int unpack_bytes
        int[11] reduce

    ctypedef struct communicator:
        device_queue queue
        int rank
        int size
        ncclUniqueId id

    ctypedef struct cuda_thread:
        device d
        cuda_thread_functions f
        cuda_thread_kernels known
        uint64_t slab_bytes
        uint64_t table_bytes
        const char* image
        const char** names
        int n_kernels
        communicator world
        int ordered
        ncclUniqueId id
        cuda_thread_failure failure
        cuda_thread_identity identity
        int left

    ctypedef struct frozen_pass:
        char[DEVICE_WHY] why

    frozen_pass* cuda_thread_new_pass(const cuda_thread* t, int op, double prescale, double postscale, const device_part* parts,
                                      int n_parts, const device_row* rows, int n_rows)
    void cuda_thread_free_pass(frozen_pass* p)
    void cuda_thread_allocate_pass(cuda_thread* t, frozen_pass* p)
    void cuda_thread_connect_pass(cuda_thread* t, frozen_pass* p, const ncclUniqueId* id)
    void cuda_thread_replay_pass(cuda_thread* t, frozen_pass* p, void* stream)
    bint cuda_thread_await_pass(cuda_thread* t, frozen_pass* p, uint64_t ns)

    const cuda_thread_function* cuda_thread_function_list
    int cuda_thread_start(cuda_thread* t)
    void cuda_thread_begin(cuda_thread* t, uint32_t job)
    bint cuda_thread_wait(cuda_thread* t, uint64_t ns)
    void cuda_thread_cancel(cuda_thread* t)
    void cuda_thread_join(cuda_thread* t)
    void cuda_thread_connect_communicator(cuda_thread* t, communicator* c)
    void cuda_thread_destroy_communicator(cuda_thread* t, communicator* c)
    uint32_t cuda_thread_await_stage(cuda_thread* t, communicator* c, uint32_t stage, uint64_t ns)


cdef class CudaThread:
    cdef:
        cuda_thread* state
        bytes image             # PTX, kept for the thread
        list names              # of the kernels, kept for the thread
        list passes             # addresses of frozen passes, freed with the CUDA thread
        set communicators       # addresses of process sets' communicators, freed with the CUDA thread
        bint ended              # whether the thread has ended, or was never started
