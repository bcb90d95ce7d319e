"""Executes one entry at a time: pack, reduce, copy, chunk by chunk. Never waits."""
from libc.stdint cimport int64_t, uint64_t

from engine_ext.data.plan cimport Piece, Plan
from engine_ext.kernels.kernels cimport engine_kernels, engine_reduction
from engine_ext.platform.clock cimport patience
from engine_ext.transport.arena cimport Arena
from engine_ext.transport.transport cimport Progress, Transport

cdef struct Executor

cdef struct Steps:          # how the chunks of an entry pass the stages; `n` counts from its first chunk
    void (*pack)(Executor* x, uint64_t n) noexcept nogil        # offer this rank's bytes to the others
    void (*reduce)(Executor* x, uint64_t n) noexcept nogil      # combine what all have offered; NULL: there is nothing to combine
    void (*copy)(Executor* x, uint64_t n) noexcept nogil        # take what others have; NULL: it is passed with reduce
    bint in_place               # tensors lie where all ranks reach them: nothing goes through the slots
    bint copies_results         # copy takes what others have reduced, not what they have packed

cdef struct Adasum:         # of the entry in progress, if it is one (operations/adasum.pyx)
    char* memory            # for the arrays
    uint64_t room           # bytes of it
    uint64_t* starts        # by piece: where its share of a compartment begins; one more: the end of the last
    double* products        # by piece and pair of ranks: inner products of this rank's parts, later of the tensors
    double* weights         # by piece and rank
    double* lanes           # by pair: running sums for the piece at hand
    uint64_t measured       # chunks in which parts are measured
    uint64_t lead           # chunks before those of the logical buffer
    double factor           # prescale and postscale

cdef struct Executor:
    int rank
    int size
    Transport* transport
    Arena* arena
    const engine_kernels* kernels
    Plan plan
    bint active
    const Steps* steps
    bint streaming
    bint needs_pack             # shared tensors: some rank must write before others read
    int root                    # of a broadcast
    uint64_t chunk              # bytes
    engine_reduction reduction
    uint64_t* gather_bytes      # allgather, all-to-all: from each rank
    uint64_t* gather_start      # and where that begins in the result
    char* gathered              # of an allgather
    uint64_t* send_bytes        # reduce-scatter, all-to-all: for each rank
    uint64_t* send_start        # and where that begins in the source; reduce-scatter: in the logical buffer
    uint64_t row_bytes          # all-to-all, as the next three
    const int64_t* rows_sent    # to each rank
    int64_t* rows_received      # from each rank: known after the first chunk
    char* received              # malloc'ed then; NULL without memory
    uint64_t first              # number of the entry's first chunk, over the whole schedule
    uint64_t end                # of the chunk after its last
    uint64_t uncopied           # before this chunk copy has nothing to do, and is passed with reduce
    uint64_t pack_gate          # from this chunk on pack, and
    uint64_t reduce_gate        # from this one on reduce, need what the stage after it has done with all before, on this rank
    Progress passed             # as published
    const patience* clock
    uint64_t progressed         # nanoseconds: when a stage was last passed, as this process has seen time pass
    bint timed                  # the entry in progress is recorded: then of each stage, in nanoseconds,
    uint64_t[3] stage_first     # when its first chunk was begun
    uint64_t[3] stage_last      # when its last chunk was done
    uint64_t[3] stage_spent     # and what lies between without the pauses
    char** slots                # scratch, by rank
    const void** sources
    void** targets
    Adasum adasum

cdef inline char* slot(const Executor* x, int rank, uint64_t n) noexcept nogil:
    """Where the chunk `n` of the entry, counted from its first, lies in the slot of `rank`."""
    return x.transport.slot(x.transport, rank, x.first + n)

cdef inline uint64_t elements(const Executor* x, const Piece* piece, uint64_t nbytes) noexcept nogil:
    """How many, in bytes that travel."""
    return nbytes // x.kernels.types[piece.wire].size

cdef inline uint64_t offset(const Executor* x, const Piece* piece, uint64_t at) noexcept nogil:
    """Where in the piece's tensor the byte `at` of the logical buffer is."""
    return elements(x, piece, at - piece.start) * x.kernels.types[piece.dtype].size

cdef int executor_open(Executor* x, int rank, int size, Transport* transport, Arena* arena, const engine_kernels* kernels,
                       const patience* clock) noexcept nogil
cdef void executor_close(Executor* x) noexcept nogil
cdef void executor_start(Executor* x, const Steps* steps, uint64_t chunks) noexcept nogil
cdef bint executor_progress(Executor* x) noexcept nogil
cdef void executor_needs(Executor* x) noexcept nogil
cdef int executor_laggard(Executor* x) noexcept nogil
cdef bint executor_passed_by(Executor* x, int rank) noexcept nogil
