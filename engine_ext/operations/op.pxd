"""An operation on this rank, from submission to completion, and the record of the name under which it is in flight.

A gradient hook touches only the first bytes of an operation and of a record, and prefetches them.
"""
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from engine_ext.gpu.device cimport device_mark
from engine_ext.shared.layout cimport FAULT_CALL, engine_meta

cdef enum:
    OP_DONE = 1         # flag of an operation: the engine does not touch it any more
    OP_ABANDONED = 2    # flag: nobody holds its handle
    OP_STAND_IN = 4     # flag: made by the engine of a rank that has joined; it has neither a handle nor a Python reference
    OP_PATIENT = 8      # flag: if there is no room for it, it waits in the backlog (native_calls.pyx) instead of its caller
    OP_TAKEN = 16       # flag: its entry was handed to the CUDA thread, which completes it
    OP_ASIDE = 32       # flag: it may remain undone: ranks that it needs may leave
    OP_IN_TURN = 64     # flag: if its name is in flight, it waits in the backlog, too

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
    Op* previous        # list of operations in flight on this rank
    Op* next            # the same list, or the deferred free list
    const char* source  # NULL: absent, contributes the identity of the operation
    char* target        # NULL: the engine allocates `memory`
    uint64_t nbytes
    void* owner         # a Python reference to what keeps the tensors alive; dropped under the GIL
    uint64_t submitted  # monotonic nanoseconds
    uint64_t unblocked  # with several hosts, monotonic ns: when the program's last wait in the engine before that ended; 0: never
    uint32_t flags      # atomic: OP_*
    int32_t status      # Status; valid once OP_DONE is set
    uint32_t agreed     # the record's `defined` for which `meta` was last found equal to the record's; 0: not compared yet
    bint awaited        # whether the coordinator has been told that a thread waits for it
    bint requested      # whether it was sent as a full request
    bint begun          # whether an entry with it has begun, so that its tensors must stay unchanged; under the lock
    engine_meta meta
    uint64_t row_bytes  # allgather, all-to-all, reduce-scatter: bytes of a row
    int64_t rows        # allgather: rows of this rank; barrier: whether ranks align behind it
    char* memory        # malloc'ed: the result, if the caller gave no target; NULL: none
    uint64_t memory_bytes   # bytes of `memory`; until the entry is planned, of a `target` that may be as long as the result
    int64_t* row_counts  # malloc'ed; allgather and all-to-all: rows from each rank; `memory` NULL: the result is in `target`
    int64_t* splits     # malloc'ed; all-to-all: rows for each rank; allgather of a group: rows and row length of each tensor
    Member* members     # malloc'ed; the meta.group tensors of a group; NULL: no group
    char* text          # malloc'ed; the error of a failed operation, or of the call whose failure this operation announces
    uint64_t number     # without a name: 1 + the number of such operations of its kind before it; with a name: 0
    uint64_t since      # when it was submitted, in nanoseconds of running time (platform/clock.h)
    Finished finished   # of a native call: takes the operation over once it is done and abandoned, and frees it; else NULL
    void* call          # malloc'ed data of the call for `finished`
    uint32_t optimizer  # 1 + number of the optimizer whose gradient it is; 0: none
    int32_t step        # 1 + number of the optimizer whose step ends with this operation; 0: none
    device_mark* mark   # tensors on a GPU: the event behind which they are ready; NULL: the CUDA thread's item has it
    uint64_t ticket     # ticket of the CUDA thread's item; 0: there is none
    uint64_t taken      # when the CUDA thread was given the item, in running time like `since`
    void* stream        # stream on which the tensors were submitted: only compared, unless `room` is known to keep it alive
    void* room          # borrowed Python function that allocates results of given sizes on that stream; `owner` keeps it
    void* result        # Python reference to the list of tensors that `room` has made; NULL: none
    bint released       # whether that stream waits for the tensors
    bint placed         # nobody uses the bytes behind `target` up to the next multiple of 16: it is a place among others
    CurrentStream stream_of  # function that finds the current stream for a thread that waits

cdef struct Record:     # a name: its metadata and the operation in flight under it
    Record* chain       # this and the next four fields are as in Named
    char* name
    uint32_t name_bytes
    int32_t id
    uint64_t hash
    Op* inflight        # stored under the lock, by store_pointer; waiters read it without the lock
    uint32_t pins       # number of hooks, waits and backlog entries that hold this record; it is freed only at 0
    uint32_t queued     # number of operations under this name in the backlog
    uint32_t failing    # number of these that only announce that a call has failed
    uint32_t defined    # number of DEFINE entries so far: a version of `meta` that is cheaper to compare
    bint fresh          # it is defined, but no entry has had it yet, so no rank has toggled its bit
    engine_meta meta    # from the DEFINE entry; valid while id >= 0
    uint32_t traced     # number of the name in the timeline; up to Trace.names_before it belongs to an earlier recording
    uint64_t times      # number of operations under this name that have ended

cdef inline bint fails(const Op* op) noexcept nogil:
    """Return whether an operation only announces to the other ranks that this rank's call has failed."""
    return op.meta.fault == FAULT_CALL
