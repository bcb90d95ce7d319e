"""The lane's thread, as its owner sees it (lane.h)."""
from libc.stdint cimport uint32_t, uint64_t

from engine_ext.gpu.device cimport DEVICE_WHY, device, device_part, device_queue, device_row


cdef extern from "engine_ext/gpu/lane.h" nogil:
    enum:
        LANE_FUNCTIONS
        LANE_KERNELS
        LANE_DTYPES
        LANE_IDENTIFY
        LANE_PREPARE
        LANE_NAME
        LANE_CONNECT
        LANE_CLOSE
        COMMUNICATOR_BEGUN
        COMMUNICATOR_CONNECTED
        COMMUNICATOR_PARTED
        COMMUNICATOR_FAILED

    ctypedef struct lane_function:
        const char* name
        int since

    ctypedef struct lane_failure:
        const char* call
        int code
        char[64] name
        char[2048] text

    ctypedef struct lane_identity:
        int driver
        int devices
        char[128] name
        char[32] pci
        unsigned char[16] uuid

    ctypedef struct lane_functions:
        pass

    ctypedef struct ncclUniqueId:
        char[128] internal

    ctypedef struct lane_kernels:
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

    ctypedef struct lane:
        device d
        lane_functions f
        lane_kernels known
        uint64_t slab_bytes
        uint64_t table_bytes
        const char* image
        const char** names
        int n_kernels
        communicator world
        int ordered
        ncclUniqueId id
        lane_failure failure
        lane_identity identity
        int left

    ctypedef struct frozen_pass:
        char[DEVICE_WHY] why

    frozen_pass* lane_new_pass(const lane* l, int op, double prescale, double postscale, const device_part* parts, int n_parts,
                               const device_row* rows, int n_rows)
    void lane_free_pass(frozen_pass* p)
    void lane_freeze(lane* l, frozen_pass* p)
    void lane_unite(lane* l, frozen_pass* p, const ncclUniqueId* id)
    void lane_repeat(lane* l, frozen_pass* p, void* stream)
    bint lane_await_pass(lane* l, frozen_pass* p, uint64_t ns)

    const lane_function* lane_function_list
    int lane_start(lane* l)
    void lane_begin(lane* l, uint32_t job)
    bint lane_wait(lane* l, uint64_t ns)
    void lane_cancel(lane* l)
    void lane_join(lane* l)
    void lane_connect(lane* l, communicator* c)
    void lane_part(lane* l, communicator* c)
    uint32_t lane_await_stage(lane* l, communicator* c, uint32_t stage, uint64_t ns)


cdef class Lane:
    cdef:
        lane* state
        bytes image             # PTX, kept for the thread
        list names              # of the kernels, kept for the thread
        list passes             # addresses of frozen passes, freed with the lane
        set communicators       # addresses of process sets' communicators, freed with the lane
        bint ended              # whether the thread has ended, or was never started
