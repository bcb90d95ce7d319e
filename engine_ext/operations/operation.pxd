"""An operation as a row: all in which one collective differs from another. kinds.pyx holds the rows.

The coordinator, which knows no tensors, goes by the fields. Every rank plans an entry by `plan`: it makes the fusion plan of the
tensors that the entry names, and hands the executor the Steps by which chunks pass. Nobody asks for a kind.
"""
from libc.stdint cimport int64_t, uint32_t, uint64_t

from engine_ext.data.executor cimport Executor
from engine_ext.kernels.kernels cimport ENGINE_DTYPES
from engine_ext.operations.op cimport Op
from engine_ext.shared.crews cimport Crews
from engine_ext.shared.layout cimport WIRE_FP8, engine_entry, engine_knobs, engine_meta, wire_compresses

cdef enum:
    SMALLEST_CHUNK = 65536
    CHUNK_UNIT = 4096       # of which chunk sizes are multiples
    ONE_SHOT_BYTES = 32768  # of all ranks together: below it a second handshake costs more than the extra reading

# Why an entry cannot go on, for which `culprit` of the executor is to blame.
cdef const char* WRONG_ROW_COUNTS

cdef enum Says:             # what a rank tells the coordinator of each submission, in `rows` of its page
    SAYS_NOTHING = 0
    SAYS_ROWS = 1           # how many rows it has; the entry tells all ranks the rows of each
    SAYS_ALIGNED = 2        # whether ranks align behind it (docs/architecture/protocol-failure.md)

cdef struct Operation:
    bint reduces            # values of ranks become one value: factors, compression and the reduction's name mean something
    bint moves              # there are bytes to move
    bint alone              # an entry carries one of it, since its size or its plan is its own
    bint rooted             # one rank gives what all receive
    bint uneven             # ranks may have different numbers of rows
    bint optional           # a rank may submit no tensor: it contributes what changes nothing, and gets the result
    bint parts              # each rank receives its part of the rows
    bint tells_members      # ranks that have joined have to know the tensors of a group one by one
    bint codes              # sums may travel between hosts block-scaled (blocks.pyx)
    Says says
    int work                # DEVICE_*: what an item does with its tensors on GPUs

    # The coordinator's. Bytes of the tensor, or of all tensors of a group; of one row where the rows may differ.
    int64_t (*bytes)(const engine_meta* meta) noexcept nogil
    # By which algorithm `entry`, whose bytes are known, travels among the ranks, and in which chunks; whoever appends the entry
    # makes that size a whole one (whole_chunk).
    void (*choose)(engine_entry* entry, const engine_knobs* knobs, const Crews* crews) noexcept nogil

    # Tensors on GPUs: number of sizes (int64, in `splits`) that each rank sends all others before the entry is handed over.
    # NULL as a function: none.
    int64_t (*count_sizes)(const engine_meta* meta, int size) noexcept nogil

    # Every rank's. Fill the operation that a rank that has joined contributes: all fields beside `meta`, without a tensor.
    void (*stand_in)(Op* op, int size) noexcept nogil
    # Start the executor on `entry`, whose operations are in `batch`. False without memory.
    bint (*plan)(Executor* x, Op** batch, const engine_entry* entry) noexcept nogil
    # The executor is done: hand over what it has made. NULL, or why that is not possible. NULL as a function: there is nothing.
    const char* (*finish)(Executor* x, Op** batch) noexcept nogil

cdef bint operation_begin(
    const Operation* operation, Executor* x, Op** batch, const engine_entry* entry, int root, bint timed
) noexcept nogil

# ---- groups, which are called by the dtype of their first tensor ---------------------------------------------------------------

cdef inline bint is_coded_whole(const engine_meta* meta) noexcept nogil:
    """Whether a tensor, or every tensor of a group, can be coded."""
    cdef int d
    for d in range(ENGINE_DTYPES if meta.group else 0):
        if meta.dims[d] and not wire_compresses(WIRE_FP8, d):
            return False
    return meta.group != 0 or wire_compresses(WIRE_FP8, meta.dtype)

cdef inline bint has_one_dtype(const engine_meta* meta) noexcept nogil:
    """Whether all tensors of a group have the dtype that the group is called by, the first one's."""
    cdef int d
    for d in range(ENGINE_DTYPES if meta.group else 0):
        if meta.dims[d] and d != meta.dtype:
            return False
    return True

# ---- what several rows share -------------------------------------------------------------------------------------------------

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
