"""An operation on this rank, from submission to completion; and the name under which it is in flight.

The first bytes of an operation and of a record are what a gradient hook touches; it prefetches them.
"""
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from engine_ext.shared.layout cimport FAULT_CALL, engine_meta

cdef enum:
    OP_DONE = 1         # flags of an operation: the engine has let go of it
    OP_ABANDONED = 2    # nobody holds its handle
    OP_STAND_IN = 4     # what a rank that has joined contributes: nobody ever held a handle, and no Python reference

cdef struct Member:     # a tensor of a group
    const char* source
    char* target
    uint64_t nbytes
    uint64_t row_bytes
    int64_t rows
    int32_t dtype

cdef struct Op:
    Record* record      # NULL once it is finished
    Op* previous        # list of what is in flight on this rank
    Op* next            # the same; or the deferred free list's
    const char* source  # NULL: absent, contributes the identity of the operation
    char* target        # NULL: the engine allocates `memory`
    uint64_t nbytes
    void* owner         # a Python reference, dropped under the GIL
    uint64_t submitted  # nanoseconds, monotonic
    uint32_t flags      # atomic
    int32_t status
    uint32_t agreed     # the record's `defined` when `meta` was found equal to its; 0: to be compared
    bint awaited
    bint requested      # a full request of it is on the ring, or was
    engine_meta meta
    uint64_t row_bytes  # allgather, all-to-all, reduce-scatter
    int64_t rows        # allgather
    char* memory        # malloc'ed result
    uint64_t memory_bytes
    int64_t* row_counts  # malloc'ed, allgather and all-to-all: rows from each rank
    int64_t* splits     # malloc'ed, all-to-all: rows for each rank; allgather of a group: rows of each member, bytes of one
    Member* members     # malloc'ed, of a group; meta says how many
    char* text          # malloc'ed, of an error; of a failure, what the others are told
    uint64_t number     # 1 + how many operations of this kind without a name came before; 0: it has a name
    uint64_t since      # nanoseconds: when it was brought, as this process has seen time pass

cdef struct Record:
    Record* chain       # this and the next four as in Named
    char* name
    uint32_t name_bytes
    int32_t id
    uint64_t hash
    Op* inflight        # stored under the lock, by store_pointer; waiters look without it
    uint32_t pins       # hooks that hold this record
    uint32_t defined    # how often: a number for the metadata, cheaper to compare
    bint fresh          # defined, and not carried by an entry yet: no rank has toggled its bit
    engine_meta meta    # as defined, when id >= 0
    uint32_t traced     # its number in the timeline; not above `names_before` there: it has none yet
    uint64_t times      # operations under it that have ended

cdef Op* new_op() except NULL
cdef void free_op(Op* op) noexcept

cdef inline bint fails(const Op* op) noexcept nogil:
    """Whether an operation only tells the other ranks that this rank's call has failed."""
    return op.meta.fault == FAULT_CALL
