"""Bytes of slots that go between two ranks over MPI, beside the connection of their lane."""
from libc.stdint cimport uint32_t, uint64_t

from engine_ext.transport.transport cimport Progress

cdef extern from "platform/mpi.h" nogil:
    ctypedef struct engine_mpi:
        void* isend
        void* irecv
        void* test
        void* cancel
        void* iallreduce
        uint64_t comm
        uint64_t byte
        uint64_t everybody
        uint64_t float32
        uint64_t float64
        uint64_t sum
        uint64_t in_place
        int ints
    ctypedef union engine_mpi_request:
        void* pointer
        int number

cdef enum:
    MESSAGES = 512              # that may be under way in one direction: what fits a rank's slots, and more

cdef struct Message:
    engine_mpi_request request
    bint tells                  # coming: behind it, the peer is as far as this
    Progress passed

cdef struct Messages:           # a ring
    Message[MESSAGES] list
    uint64_t head               # atomic: number of the oldest, since the start
    uint64_t tail               # atomic: number after the newest

cdef struct Courier:            # of a lane whose large offers go over MPI
    const engine_mpi* library
    int rank                    # the peer's, in MPI
    int tag                     # of the engine, a world's or a process set's
    Messages going              # under the lock of MPI
    Messages coming             # the network thread alone

cdef struct Summing:            # over all ranks of the world, one at a time
    const engine_mpi* library   # NULL: these ranks cannot
    char* room                  # malloc'ed: what is summed, in place
    uint64_t room_bytes
    engine_mpi_request request  # under the lock of MPI
    uint32_t state              # atomic, SUMMING_*

cdef enum:
    SUMMING_NOTHING = 0         # none was begun, or the last is done
    SUMMING_GOES_ON = 1
    SUMMING_FAILED = 2          # MPI has refused, or failed; nothing is known of the room

cdef char* summing_room(Summing* summing, uint64_t nbytes) noexcept nogil
cdef void summing_begin(Summing* summing, uint64_t count, int item_bytes) noexcept nogil
cdef bint summing_busy(Summing* summing) noexcept nogil
cdef bint summing_look(Summing* summing) noexcept nogil
cdef void summing_close(Summing* summing) noexcept nogil
cdef bint courier_send(Courier* courier, const char* data, uint64_t nbytes) noexcept nogil
cdef bint courier_receive(Courier* courier, char* data, uint64_t nbytes) noexcept nogil
cdef bint courier_tell(Courier* courier, const Progress* passed) noexcept nogil
cdef int courier_arrived(Courier* courier, Progress* passed) noexcept nogil
cdef bint courier_sent(Courier* courier) noexcept nogil
cdef bint courier_busy(Courier* courier) noexcept nogil
cdef bint courier_close(Courier* courier) noexcept nogil
