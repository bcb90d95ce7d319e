"""An operation on this rank, from submission to completion; and the name under which it is in flight.

The first bytes of an operation and of a record are what a gradient hook touches; it prefetches them.
"""
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from engine_ext.gpu.device cimport device_mark
from engine_ext.shared.layout cimport FAULT_CALL, engine_meta

cdef enum:
    OP_DONE = 1         # flag of an operation: the engine does not touch it any more
    OP_ABANDONED = 2    # flag: nobody holds its handle
    OP_STAND_IN = 4     # flag: made by the engine of a rank that has joined; it has neither a handle nor a Python reference
    OP_PATIENT = 8      # flag: where there is no room for it, it waits in the backlog (native_calls.pyx), and its maker does not
    OP_TAKEN = 16       # flag: its entry was handed to the GPU's lane, which completes it
    OP_ASIDE = 32       # flag: nobody minds if it is never done: ranks that it needs may leave
    OP_IN_TURN = 64     # flag: where its name is in flight, it waits in the backlog, too

cdef struct Member:     # a tensor of a group
    const char* source
    char* target
    uint64_t nbytes
    uint64_t row_bytes
    int64_t rows
    int32_t dtype

ctypedef void (*Finished)(Op* op) noexcept nogil
ctypedef int (*CurrentStream)(int device_type, int32_t ordinal, void** stream) except -1     # with the GIL

cdef struct Op:
    Record* record      # NULL once it is finished
    Op* previous        # list of what is in flight on this rank
    Op* next            # the same; or the deferred free list's
    const char* source  # NULL: absent, contributes the identity of the operation
    char* target        # NULL: the engine allocates `memory`
    uint64_t nbytes
    void* owner         # a Python reference, dropped under the GIL
    uint64_t submitted  # nanoseconds, monotonic
    uint64_t unblocked  # where ranks are on several hosts: when the program was last blocked in the engine before that; 0: never
    uint32_t flags      # atomic: OP_*
    int32_t status      # Status; valid once OP_DONE is set
    uint32_t agreed     # the record's `defined` at which `meta` was last found equal to the record's; 0: to be compared
    bint awaited        # whether the coordinator has been told that a thread waits for it
    bint requested      # whether it was sent as a full request
    bint begun          # whether an entry with it has begun, and its tensors stay as they are; under the lock
    engine_meta meta
    uint64_t row_bytes  # allgather, all-to-all, reduce-scatter: bytes of a row
    int64_t rows        # allgather: rows of this rank; barrier: whether ranks align behind it
    char* memory        # malloc'ed: the result, where the caller gave no target; NULL: none
    uint64_t memory_bytes   # of `memory`; until the entry is planned, of a `target` that may be as long as the result, or not
    int64_t* row_counts  # malloc'ed; allgather and all-to-all: rows from each rank; `memory` NULL: the result is in `target`
    int64_t* splits     # malloc'ed; all-to-all: rows for each rank; allgather of a group: rows and row length of each tensor
    Member* members     # malloc'ed; the meta.group tensors of a group; NULL: no group
    char* text          # malloc'ed; the error of an operation that failed, or of the call whose failure this one announces
    uint64_t number     # without a name: 1 + the number of such operations of its kind before it; with a name: 0
    uint64_t since      # when it was submitted: nanoseconds of the time that this process has seen pass (clock.h)
    Finished finished   # of a native call: takes the operation over once it is done and abandoned, and frees it; else NULL
    void* call          # malloc'ed: what `finished` needs to know of the call
    uint32_t optimizer  # 1 + number of the optimizer whose gradient it is; 0: of none
    int32_t step        # 1 + number of the optimizer whose step ends with this operation; 0: no step does
    device_mark* mark   # of tensors on a GPU: when they are ready; NULL: the lane's item has it
    uint64_t ticket     # of that item; 0: there is none
    uint64_t taken      # when the lane was given it: as `since`
    void* stream        # the stream on which they were submitted: compared, and used only by who knows that `room` keeps it
    void* room          # a Python function that makes room for results of given sizes on that stream: `owner` keeps it
    void* result        # a Python reference to what it has made, a list of tensors; NULL: there is none
    bint released       # that stream waits for them
    bint placed         # `target` is a place among others: behind it, up to the next multiple of 16 bytes, nobody has anything
    CurrentStream stream_of  # which stream is the current one now, for whoever waits

cdef struct Record:
    Record* chain       # this and the next four as in Named
    char* name
    uint32_t name_bytes
    int32_t id
    uint64_t hash
    Op* inflight        # stored under the lock, by store_pointer; waiters look without it
    uint32_t pins       # hooks, waits and the backlog hold this record: it is not freed while there are any
    uint32_t queued     # operations under this name in the backlog
    uint32_t failing    # of these, how many only tell that a call has failed
    uint32_t defined    # DEFINE entries so far: a version of `meta`, cheaper to compare than it
    bint fresh          # defined, and in no entry yet: no rank has toggled its bit
    engine_meta meta    # as the DEFINE entry gave it; valid while id >= 0
    uint32_t traced     # number of the name in the timeline; up to Trace.names_before it is an earlier recording's: none yet
    uint64_t times      # number of operations under this name that have ended

cdef inline bint fails(const Op* op) noexcept nogil:
    """Whether an operation only tells the other ranks that this rank's call has failed."""
    return op.meta.fault == FAULT_CALL
