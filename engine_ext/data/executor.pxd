"""Executes one entry at a time: pack, reduce, copy, chunk by chunk. Never waits."""
from libc.stdint cimport int64_t, uint64_t, uint8_t

from engine_ext.control.segment cimport Segment
from engine_ext.data.kernels cimport engine_kernels, engine_reduction
from engine_ext.data.plan cimport Plan
from engine_ext.transport.arena cimport Arena

cdef struct Executor:
    Segment* segment
    Arena* arena
    const engine_kernels* kernels
    Plan plan
    bint active
    uint8_t kind
    uint8_t algorithm
    bint streaming
    bint needs_pack             # shared tensors: some rank must write before others read
    int root
    uint64_t chunk              # bytes
    uint64_t element            # bytes, as it travels; so are all bytes of the plan
    uint64_t ratio              # bytes in a tensor for each that travels: 1 but for compressed entries
    engine_reduction reduction
    uint64_t* gather_bytes      # allgather, all-to-all: from each rank
    uint64_t* gather_start      # and where that begins in the target
    uint64_t* send_bytes        # reduce-scatter, all-to-all: for each rank
    uint64_t* send_start        # and where that begins in the source
    uint64_t row_bytes          # all-to-all, as the next three
    const int64_t* rows_sent    # to each rank
    int64_t* rows_received      # from each rank: known after the first chunk
    char* received              # malloc'ed then; NULL without memory
    uint64_t first              # number of the entry's first chunk, over the whole schedule
    uint64_t end                # of the chunk after its last
    uint64_t packed             # chunks passed, as published
    uint64_t reduced
    uint64_t copied
    uint64_t[3] known           # least packed, reduced, copied of all ranks, as last seen
    uint64_t progressed         # nanoseconds: when a stage was last passed
    const void** sources        # scratch, by rank
    void** targets

cdef int executor_open(Executor* x, Segment* segment, Arena* arena, const engine_kernels* kernels) noexcept nogil
cdef void executor_close(Executor* x) noexcept nogil
cdef void executor_start(Executor* x, uint64_t chunks) noexcept nogil
cdef bint executor_progress(Executor* x) noexcept nogil
cdef void executor_needs(Executor* x, uint64_t* need) noexcept nogil
cdef int executor_laggard(Executor* x) noexcept nogil
