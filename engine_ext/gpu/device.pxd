"""An open GPU, as the other planes see it (device.h)."""
from libc.stdint cimport uint32_t, uint64_t

cdef extern from "engine_ext/gpu/device.h" nogil:
    enum:
        DEVICE_WHY
        DEVICE_OUTSTANDING
        DEVICE_NAME

    ctypedef struct device_mark:
        device_mark* next
        void* event

    enum:
        DEVICE_QUEUE
        DEVICE_PACK
        DEVICE_NCCL
        DEVICE_UNPACK
        DEVICE_EXPOSED
        DEVICE_STAGES
        DEVICE_SLICES

    ctypedef struct device_slice:
        int stage
        uint64_t begun
        uint64_t ended

    ctypedef struct device_sample:
        uint64_t sequence
        uint64_t bytes
        uint64_t[5] ns
        unsigned int has
        uint64_t error_ns
        int n_slices
        device_slice[32] slices

    ctypedef struct device_row:
        uint64_t tensor
        uint64_t offset
        uint64_t bytes

    ctypedef struct device_part:
        int dtype
        int wire
        int begin
        int end
        uint64_t bytes
        uint64_t identity
        uint64_t place

    ctypedef struct device_transfer:
        uint64_t source
        uint64_t target
        uint64_t* sent
        uint64_t* received

    enum:
        DEVICE_ALLREDUCE
        DEVICE_BROADCAST
        DEVICE_REDUCESCATTER
        DEVICE_ALLGATHER
        DEVICE_ALLTOALL
        DEVICE_CONNECT
        DEVICE_DESTROY

    ctypedef struct device_queue:
        device* d
        device_queue* next
        int number
        int retired
        uint64_t wanted
        uint64_t asked
        uint64_t handed
        uint64_t given
        uint64_t since

    ctypedef struct device_item:
        device_item* next
        device_queue* queue
        uint64_t ticket
        uint64_t sequence
        uint64_t bytes
        int work
        int root
        int op
        int in_place
        int lacking
        uint32_t unallocated
        double prescale
        double postscale
        device_part* parts
        device_row* sources
        device_row* targets
        device_transfer* transfers
        device_mark** ready
        int n_parts
        int n_rows
        int n_transfers
        int n_ready
        int n_ops
        void** ops
        device_item* next_roomless
        void* owner
        void (*ended)(device_item* item, const char* why) noexcept nogil

    ctypedef struct device:
        int ordinal
        void* call
        uint64_t pushed
        uint64_t ended
        uint64_t enqueued
        uint64_t passed
        uint64_t begun
        char[DEVICE_OUTSTANDING][DEVICE_NAME] names
        int (*mark)(device* d, void* stream, device_mark** made, char* why) noexcept nogil
        void (*unmark)(device* d, device_mark* mark) noexcept nogil
        void (*push)(device* d, device_item* item) noexcept nogil
        int (*turn)(device_queue* queue) noexcept nogil
        void (*set_targets)(device* d, device_item* item) noexcept nogil
        int (*wait)(device* d, void* stream, uint64_t ticket, bint measured, char* why) noexcept nogil
        int (*relax)(device* d, char* why) noexcept nogil
        bint (*has_passed)(device* d, uint64_t ticket) noexcept nogil
        bint (*frozen_rest)(device* d) noexcept nogil
        void (*stop)(device* d) noexcept nogil
        void* owner
        void (*failed)(device* d, const char* why) noexcept nogil
        void (*went_on)(device* d, uint64_t tickets) noexcept nogil
        void (*sampled)(device* d, const device_sample* sample) noexcept nogil
