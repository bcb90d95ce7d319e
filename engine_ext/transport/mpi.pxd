"""Bytes of slots that go between two ranks over MPI, beside the connection of their lane."""
from libc.stdint cimport uint64_t

from engine_ext.transport.transport cimport Progress

cdef extern from "platform/mpi.h" nogil:
    ctypedef struct engine_mpi:
        void* isend
        void* irecv
        void* test
        void* cancel
        uint64_t comm
        uint64_t byte
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

cdef bint courier_send(Courier* courier, const char* data, uint64_t nbytes) noexcept nogil
cdef bint courier_receive(Courier* courier, char* data, uint64_t nbytes) noexcept nogil
cdef bint courier_tell(Courier* courier, const Progress* passed) noexcept nogil
cdef int courier_arrived(Courier* courier, Progress* passed) noexcept nogil
cdef bint courier_sent(Courier* courier) noexcept nogil
cdef bint courier_busy(Courier* courier) noexcept nogil
cdef bint courier_close(Courier* courier) noexcept nogil
