"""An operation's row: everything in which one collective differs from another. kinds.pyx holds the rows.

The coordinator, which knows no tensors, reads the fields. Every rank plans an entry by `plan`, which makes the fusion plan of the
entry's tensors and gives the executor the Steps for the chunks. No other code depends on the kind.
"""
from libc.stdint cimport int64_t, uint32_t, uint64_t

from engine_ext.data.executor cimport Executor
from engine_ext.kernels.kernels cimport ENGINE_DTYPES
from engine_ext.operations.op cimport Op
from engine_ext.shared.crews cimport Crews
from engine_ext.shared.layout cimport WIRE_FP8, engine_entry, engine_knobs, engine_meta, wire_compresses

cdef enum:
    SMALLEST_CHUNK = 65536
    CHUNK_UNIT = 4096       # chunk sizes are multiples of it
    ONE_SHOT_BYTES = 32768  # of all ranks together: below it a second handshake costs more than reading the extra bytes

# The error of an entry that cannot go on because `culprit` of the executor has sent wrong numbers.
cdef const char* WRONG_ROW_COUNTS

cdef enum Says:             # the number that a rank tells the coordinator of each submission, in `rows` of its page
    SAYS_NOTHING = 0
    SAYS_ROWS = 1           # its number of rows; the entry tells all ranks the rows of each
    SAYS_ALIGNED = 2        # whether ranks align behind it (docs/architecture/protocol-failure.md)

cdef struct Operation:
    bint reduces            # values of ranks become one value, so factors, compression and the reduction's name have a meaning
    bint moves              # there are bytes to move
    bint alone              # an entry carries one such operation, since its size or its plan is special
    bint rooted             # all ranks receive the tensor of one rank
    bint uneven             # ranks may have different numbers of rows
    bint optional           # a rank may submit no tensor: it contributes the identity, and gets the result
    bint parts              # each rank receives its part of the rows
    bint tells_members      # ranks that have joined have to know each tensor of a group
    bint codes              # sums may travel block-scaled between hosts (blocks.pyx)
    Says says
    int work                # DEVICE_*: the work of the CUDA thread's item for tensors on GPUs

    # For the coordinator. Return the bytes of the tensor, or of all tensors of a group; of one row if ranks' rows may differ.
    int64_t (*bytes)(const engine_meta* meta) noexcept nogil
    # Choose the algorithm and the chunk size of `entry`, whose bytes are known. The function that appends the entry rounds the
    # chunk size (whole_chunk).
    void (*choose)(engine_entry* entry, const engine_knobs* knobs, const Crews* crews) noexcept nogil

    # Tensors on GPUs: return the number of sizes (int64, in `splits`) that each rank sends to all others before the entry is
    # handed to the CUDA thread. NULL as a function: none.
    int64_t (*count_sizes)(const engine_meta* meta, int size) noexcept nogil

    # For every rank. Fill in the operation that a rank that has joined contributes: all fields except `meta`, without a tensor.
    void (*stand_in)(Op* op, int size) noexcept nogil
    # Start the executor on `entry`, whose operations are in `batch`; False without memory.
    bint (*plan)(Executor* x, Op** batch, const engine_entry* entry) noexcept nogil
    # Take the results from the executor, which is done. Return NULL, or an error. NULL as a function: there is nothing to do.
    const char* (*finish)(Executor* x, Op** batch) noexcept nogil

cdef bint operation_begin(
    const Operation* operation, Executor* x, Op** batch, const engine_entry* entry, int root, bint timed
) noexcept nogil

# ---- groups, whose `dtype` is that of their first tensor -----------------------------------------------------------------------

cdef inline bint is_coded_whole(const engine_meta* meta) noexcept nogil:
    """Return whether a tensor, or every tensor of a group, can travel block-scaled."""
    cdef int d
    for d in range(ENGINE_DTYPES if meta.group else 0):
        if meta.dims[d] and not wire_compresses(WIRE_FP8, d):
            return False
    return meta.group != 0 or wire_compresses(WIRE_FP8, meta.dtype)

cdef inline bint has_one_dtype(const engine_meta* meta) noexcept nogil:
    """Return whether all tensors of a group have the dtype of the first one."""
    cdef int d
    for d in range(ENGINE_DTYPES if meta.group else 0):
        if meta.dims[d] and d != meta.dtype:
            return False
    return True

# ---- functions that several rows share ---------------------------------------------------------------------------------------

cdef int64_t bytes_of_all(const engine_meta* meta) noexcept nogil
cdef int64_t bytes_of_row(const engine_meta* meta) noexcept nogil
cdef uint32_t whole_chunk(uint32_t wanted) noexcept nogil
cdef bint is_whole_chunk(uint32_t nbytes) noexcept nogil
cdef void choose_two_shot(engine_entry* entry, const engine_knobs* knobs, const Crews* crews) noexcept nogil
cdef void choose_scatter(engine_entry* entry, const engine_knobs* knobs, const Crews* crews) noexcept nogil
cdef void stand_in_tensor(Op* op, int size) noexcept nogil
cdef void stand_in_rows(Op* op, int size) noexcept nogil
cdef bint give_target(Op* op) noexcept nogil
cdef bint plan_tensors(Executor* x, Op** batch, const engine_entry* entry) noexcept nogil
cdef bint plan_bytes(Executor* x, const char* source, char* target, uint64_t nbytes) noexcept nogil
cdef uint64_t chunks_of_plan(const Executor* x) noexcept nogil

cdef Op* make_op() noexcept nogil
cdef Op* new_op() except NULL
cdef void free_op(Op* op) noexcept
cdef void free_parts(Op* op) noexcept nogil
