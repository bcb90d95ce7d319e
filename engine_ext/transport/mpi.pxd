"""Functions and handles of an MPI library (platform/mpi.h describes them)."""
from libc.stdint cimport uint64_t

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
    int engine_mpi_send(const engine_mpi* library, const void* data, int nbytes, int rank, int tag, engine_mpi_request* request)
    int engine_mpi_receive(const engine_mpi* library, void* data, int nbytes, int rank, int tag, engine_mpi_request* request)
    int engine_mpi_sum(const engine_mpi* library, void* data, int count, int item_bytes, engine_mpi_request* request)
    int engine_mpi_test(const engine_mpi* library, engine_mpi_request* request)
    void engine_mpi_cancel(const engine_mpi* library, engine_mpi_request* request)
