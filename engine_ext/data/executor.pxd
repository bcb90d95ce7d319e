"""The executor: it runs one entry at a time through the stages pack, reduce and copy, chunk by chunk. It never waits."""
from libc.stdint cimport int32_t, int64_t, uint64_t

from engine_ext.kernels.kernels cimport dtype_bytes, engine_kernels, engine_reduction
from engine_ext.platform.clock cimport patience
from engine_ext.shared.crews cimport Crews
from engine_ext.transport.arena cimport Arena
from engine_ext.transport.transport cimport Progress, Stage, Transport

cdef struct Piece:          # a tensor in the logical buffer
    const char* source      # NULL: absent here, contributes the identity of the operation
    char* target
    uint64_t start          # bytes from the buffer's start: a multiple of PIECE_ALIGNMENT; within a group, of the element size
    uint64_t nbytes         # size in the buffer; a tensor that is compressed on the way is larger
    int64_t shared          # place in the arena; -1: not in the arena
    int32_t dtype           # of the tensor
    int32_t wire            # dtype in the buffer

cdef struct Plan:
    Piece* pieces
    int32_t count
    int32_t room            # capacity of `pieces`
    uint64_t end            # end of the last piece, in bytes from the buffer's start
    uint64_t total          # bytes of the logical buffer, gaps included

cdef enum:
    PIECE_ALIGNMENT = 64

cdef struct Cut:            # the part [low, high) of a piece that lies in the range [begin, end) of the logical buffer
    Piece* piece
    int32_t k               # number of the piece
    uint64_t low
    uint64_t high
    uint64_t begin
    uint64_t end

cdef struct Executor

cdef struct Steps:          # functions that take a chunk through the stages; `n` counts from the entry's first chunk
    void (*pack)(Executor* x, uint64_t n) noexcept nogil        # write this rank's bytes to its slot
    void (*reduce)(Executor* x, uint64_t n) noexcept nogil      # combine all ranks' bytes; NULL: there is nothing to combine
    void (*copy)(Executor* x, uint64_t n) noexcept nogil        # copy from others' slots; NULL: a chunk passes copy with reduce
    # Call `offer` below for what a stage has put into this rank's slot, if others cannot read it in place; NULL: nothing.
    void (*offer)(Executor* x, Stage stage, uint64_t n) noexcept nogil
    bint in_place               # tensors lie where all ranks reach them: nothing goes through the slots
    bint copies_results         # copy takes what others have reduced, not what they have packed

cdef struct Adasum:         # state of an entry that is an Adasum (operations/adasum.pyx)
    char* memory            # malloc'ed, for the arrays below; kept from entry to entry
    uint64_t room           # bytes of `memory`
    uint64_t* starts        # by piece: beginning of its share of all compartments, in bytes; one more: the end of the last
    double* products        # by piece and pair of ranks: inner products of this rank's parts, later of the tensors
    double* weights         # by piece and rank: factor of that rank's tensor in the sum
    double* lanes           # by pair: ENGINE_INNER_LANES running sums of the piece that is being measured
    uint64_t measured       # number of chunks in which inner products are computed
    uint64_t lead           # number of chunks before those of the logical buffer
    double factor           # prescale times postscale

cdef struct Chain:          # state of an entry whose sums pass from host to host (operations/chain.pyx)
    int turns               # number of pieces of a chunk, each of which starts at another host; 1: all start at the first host
    uint64_t growth         # bytes of an accumulator for each byte that is reduced
    uint64_t piece          # bytes of a slot for one packed piece
    uint64_t part           # bytes of a slot for a rank's part of a piece, as it travels
    uint64_t chunks         # number of chunks of the logical buffer

cdef struct Blocks:         # state of an entry whose sums travel block-scaled (operations/blocks.pyx)
    uint64_t lag            # number of chunks by which the second leg follows the first; 0: no host has several ranks
    uint64_t chunks         # number of chunks of the logical buffer
    uint64_t packed         # bytes of a slot for float32 values that ranks of one host read; 0: no host has several ranks
    uint64_t part           # bytes of a slot for a rank's part of a share: codes and scales
    uint64_t not_finite     # number of blocks of the result that this rank has encoded as NaN

cdef struct Executor:
    int rank
    int size
    const Crews* crews
    Transport* transport
    Arena* arena
    const engine_kernels* kernels
    Plan plan                   # of the entry in progress, like all fields down to `progressed`
    bint active                 # whether an entry is in progress
    int culprit                 # the rank that has sent impossible numbers; -1: none has
    const Steps* steps
    bint streaming              # whether results are written by streaming stores
    bint needs_pack             # whether some rank lacks a tensor and must write the identity before others read it
    int root                    # broadcast: the rank whose values all get
    uint64_t chunk              # bytes of the logical buffer in one chunk
    engine_reduction reduction
    uint64_t* gather_bytes      # allgather, all-to-all: bytes from each rank
    uint64_t* gather_start      # allgather, all-to-all: offset of these bytes in the result
    char* gathered              # allgather: the result
    uint64_t* send_bytes        # reduce-scatter, all-to-all: bytes for each rank
    uint64_t* send_start        # all-to-all: offset of these bytes in the source; reduce-scatter: in the logical buffer
    uint64_t row_bytes          # all-to-all: bytes of a row
    const int64_t* rows_sent    # all-to-all: rows for each rank
    int64_t* rows_received      # all-to-all: rows from each rank; known after the first chunk
    char* given                 # all-to-all: the caller's memory for a result of exactly `given_bytes`; NULL: none
    uint64_t given_bytes
    char* received              # all-to-all: the result, `given` or malloc'ed after the first chunk; NULL: no memory for it
    uint64_t first              # number of the entry's first chunk, over the whole schedule
    uint64_t end                # number of the chunk after its last
    uint64_t uncopied           # chunks before this number have nothing to copy: they pass copy with reduce
    uint64_t pack_gate          # chunks from this number on are packed only when all before it are reduced on this rank
    uint64_t reduce_gate        # chunks from this number on are reduced only when all before it are copied on this rank
    uint64_t reduce_lag         # chunk n is reduced only when chunk n - reduce_lag is copied on this rank
    bint takes_nothing          # no other rank has anything for this one, so reduce does not wait for them to pack
    bint sums                   # the transport sums what pack gives it: reduce waits only for that sum
    Progress passed             # number of chunks of the schedule that each stage has passed here, as published to other ranks
    const patience* clock
    bint waits                  # whether it can go on only when other ranks make progress
    uint64_t begun              # set by the caller of executor_start: when it read the clock, in monotonic nanoseconds
    uint64_t progressed         # atomic: when a chunk last passed a stage, in nanoseconds of running time (platform/clock.h)
    bint timed                  # whether the entry is recorded; the next three fields, by stage, are valid then
    uint64_t[3] stage_first     # monotonic nanoseconds: when the first chunk was begun
    uint64_t[3] stage_last      # monotonic nanoseconds: when the last chunk was done
    uint64_t[3] stage_spent     # nanoseconds of work in between, without pauses
    char** slots                # scratch memory by rank, like the next two fields
    const void** sources
    void** targets
    Adasum adasum
    Chain chain
    Blocks blocks

cdef void plan_clear(Plan* plan) noexcept nogil
cdef void plan_free(Plan* plan) noexcept nogil
cdef Piece* plan_add(
    Plan* plan, const char* source, char* target, uint64_t nbytes, int dtype, int wire, int64_t shared
) noexcept nogil
cdef Piece* plan_append(
    Plan* plan, const char* source, char* target, uint64_t nbytes, int dtype, int wire, int64_t shared
) noexcept nogil
cdef int32_t plan_find(const Plan* plan, uint64_t at) noexcept nogil

cdef inline Cut cut_range(const Plan* plan, uint64_t begin, uint64_t end) noexcept nogil:
    """Return a cut before the first piece of [begin, end), for loops of the form `while next_piece(&plan, &cut)`."""
    cdef Cut cut
    cut.piece, cut.low, cut.high = NULL, 0, 0
    cut.begin, cut.end, cut.k = begin, end, plan_find(plan, begin) - 1
    return cut

cdef inline bint next_piece(const Plan* plan, Cut* cut) noexcept nogil:
    """Advance to the next piece that has bytes in the range; False: there is none. Gaps between pieces are skipped."""
    while cut.k + 1 < plan.count and plan.pieces[cut.k + 1].start < cut.end:
        cut.k += 1
        cut.piece = &plan.pieces[cut.k]
        cut.low, cut.high = max(cut.begin, cut.piece.start), min(cut.end, cut.piece.start + cut.piece.nbytes)
        if cut.low < cut.high:
            return True
    return False

cdef inline char* slot(const Executor* x, int rank, uint64_t n) noexcept nogil:
    """Return the address of the slot of `rank` for chunk `n` of the entry, counted from its first."""
    return x.transport.slot(x.transport, rank, x.first + n)

cdef inline void offer(const Executor* x, int rank, uint64_t n, uint64_t begin, uint64_t end) noexcept nogil:
    """Offer [begin, end) of this rank's slot for chunk `n` of the entry to `rank`; -1: to every rank."""
    x.transport.offer(x.transport, rank, x.first + n, begin, end - begin)

cdef inline uint64_t elements(const Executor* x, const Piece* piece, uint64_t nbytes) noexcept nogil:
    """Return the number of elements in `nbytes` of the logical buffer."""
    return nbytes // <uint64_t>dtype_bytes(piece.wire)

cdef inline uint64_t offset(const Executor* x, const Piece* piece, uint64_t at) noexcept nogil:
    """Return the offset in the piece's tensor, in bytes, of byte `at` of the logical buffer."""
    return elements(x, piece, at - piece.start) * <uint64_t>dtype_bytes(piece.dtype)

cdef int executor_open(Executor* x, int rank, const Crews* crews, Transport* transport, Arena* arena,
                       const engine_kernels* kernels, const patience* clock) noexcept nogil
cdef void executor_close(Executor* x) noexcept nogil
cdef void executor_start(Executor* x, const Steps* steps, uint64_t chunks) noexcept nogil
cdef bint executor_progress(Executor* x) noexcept nogil
cdef void executor_needs(Executor* x) noexcept nogil
cdef int executor_laggard(Executor* x, bint elsewhere) noexcept nogil
cdef bint executor_passed_by(Executor* x, int rank) noexcept nogil

cdef void pack_range(Executor* x, char* into, uint64_t begin, uint64_t low, uint64_t high) noexcept nogil
cdef void copy_range(Executor* x, const char* out, uint64_t begin, uint64_t low, uint64_t high) noexcept nogil
cdef void identity_of_absent(Executor* x, char* into, uint64_t begin, uint64_t low, uint64_t high) noexcept nogil
cdef void reduce_range(Executor* x, uint64_t n, uint64_t begin, uint64_t low, uint64_t high, int copies) noexcept nogil
cdef void find_slots(Executor* x, uint64_t n) noexcept nogil
cdef void find_sources(Executor* x, const Cut* cut, uint64_t begin) noexcept nogil

# ---- a chunk of the logical buffer, cut into the part that each rank reduces -------------------------------------------------

cdef inline uint64_t chunk_end(const Executor* x, uint64_t begin) noexcept nogil:
    """Return the end of the chunk that begins at `begin` of the logical buffer."""
    return min(begin + x.chunk, x.plan.total)

cdef inline uint64_t share_start(uint64_t begin, uint64_t end, int k, int count) noexcept nogil:
    """Return the beginning of share k of [begin, end), cut into `count` shares; share `count` begins at the end. No cache line
    has bytes of two shares."""
    cdef uint64_t lines = (end - begin + PIECE_ALIGNMENT - 1) // PIECE_ALIGNMENT
    return min(begin + lines * <uint64_t>k // <uint64_t>count * PIECE_ALIGNMENT, end)

cdef inline uint64_t part_start(const Executor* x, uint64_t begin, uint64_t end, int rank) noexcept nogil:
    """Return the beginning of the part of `rank` in the chunk [begin, end); the part of rank `size` begins at the end."""
    return share_start(begin, end, rank, x.size)

# ---- a chunk with a compartment for every rank, all of one size: compartment r of rank s's slot has the bytes from s to r ----

cdef inline uint64_t compartment(const Executor* x) noexcept nogil:
    """Return the bytes of one compartment."""
    return x.chunk // <uint64_t>x.size // PIECE_ALIGNMENT * PIECE_ALIGNMENT

cdef inline char* place(const Executor* x, int owner, uint64_t n, int reader) noexcept nogil:
    """Return the address of the compartment from `owner` to `reader` in chunk n."""
    return slot(x, owner, n) + <uint64_t>reader * compartment(x)

cdef inline uint64_t in_compartment(const Executor* x, uint64_t total, uint64_t begin) noexcept nogil:
    """Return how many of `total` bytes are in the compartment that begins at byte `begin` of them."""
    return 0 if begin >= total else min(compartment(x), total - begin)

cdef void fill_identity(char* into, int dtype, int op, uint64_t count) noexcept nogil
