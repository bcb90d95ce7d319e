"""Cython's view of the control segment (layout.h, which describes the fields), and the status of native calls."""
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t

cdef extern from "engine_ext/shared/layout.h" nogil:
    enum:
        ENGINE_PROTOCOL, MAX_RANKS, COORDINATOR, MAX_DIMS, IDS, ID_WORDS, RING_WORDS, BATCH_ITEMS, REQUEST_BYTES, NAME_BYTES
        REASON_BYTES, FAILURE_BYTES, MAX_GROUP, SLOTS, SLOT_BYTES, MAX_SOCKETS, DOOR_THREAD, DIM_SPARSE, DIM_MOVED
        DIM_DIGEST, DIM_FAULT
        UNNAMED, UNNAMED_SHIFT, ARRIVAL_LAST_BITS, ARRIVAL_WAIT_BITS
        KIND_ALLREDUCE, KIND_BROADCAST, KIND_ALLGATHER, KIND_BARRIER, KIND_ALLTOALL, KIND_REDUCESCATTER, KINDS
        ALGORITHM_ONE_SHOT, ALGORITHM_TWO_SHOT, ALGORITHM_SHARED, ALGORITHM_SCATTER, ALGORITHM_ADASUM
        ALGORITHM_CHAIN, ALGORITHM_RING, ALGORITHM_CARRIER, ALGORITHM_DEVICE, ALGORITHM_BLOCKS, ALGORITHMS
        ENTRY_PAD, ENTRY_BATCH, ENTRY_DEFINE, ENTRY_EVICT, ENTRY_ERROR, ENTRY_SKIP, ENTRY_JOINED, ENTRY_TURN
        LAYOUT_ROWS, LAYOUT_CHANNELS_LAST, LAYOUT_CHANNELS_LAST_3D, LAYOUT_SPARSE
        FAULT_NONE, FAULT_INDEX, FAULT_ORDER, FAULTS, FAULT_CALL
        STORES_CACHED, STORES_STREAMING, STORES_AUTO, STORES
        BETWEEN_AUTO, BETWEEN_DIRECT, BETWEEN_CHAIN, BETWEEN_RING, BETWEEN_CARRIER, BETWEENS
        WIRE_NONE, WIRE_FP16, WIRE_BF16, WIRE_FP8, WIRES, WIRE_TUNED8, WIRE_TUNED
        CAUSE_NONE, CAUSE_DIED, CAUSE_RAISED, CAUSE_LEFT, CAUSE_STALLED, CAUSE_LOST, CAUSES
        ENTRY_NEEDS_PACK, ENTRY_MEMBERS, ENTRY_ALIGN, ENTRY_FROZEN
        SLEEP_ENGINE, SLEEP_WAITER, SLEEP_DOORS, SLEEP_IN_ENTRY, SLEEP_CYCLE, SLEEP_FULL, SLEEP_RELAY, SLEEP_COUNT_SHIFT
    const uint64_t SEGMENT_MAGIC
    const char** KIND_NAMES
    const char** ALGORITHM_NAMES
    const char** ENTRY_NAMES
    const char** LAYOUT_NAMES
    const char** STORES_NAMES
    const char** BETWEEN_NAMES
    const char** WIRE_NAMES
    const char** CAUSE_NAMES
    const char* NAMES_TEXT

    ctypedef struct engine_meta:
        uint8_t kind, dtype, op, layout
        int32_t root
        double prescale, postscale
        int64_t shared
        uint8_t wire, fault, device
        uint32_t ndim, group
        int64_t dims[13]        # MAX_DIMS

    ctypedef struct engine_request:
        uint32_t bytes
        uint16_t name_bytes, absent
        int64_t rows
        uint64_t submitted
        uint32_t text_bytes, optimizer
        int32_t turn
        engine_meta meta

    ctypedef struct engine_knobs:
        uint64_t fusion_threshold
        double cycle_time_ms
        uint32_t version, chunk_bytes
        uint8_t stores, compression, sockets_per_lane, between_hosts

    ctypedef struct engine_entry:
        uint32_t words
        uint8_t type, kind, algorithm, stores
        uint32_t items, flags
        uint64_t sequence, bytes
        engine_knobs knobs
        uint32_t chunk
        int32_t id, name_bytes
        uint64_t closed, earliest, arrival
        engine_meta meta

    ctypedef struct segment_header:
        uint64_t magic, layout, bytes
        uint32_t protocol, size, generation
        uint64_t end, members, abort, claim
        uint32_t closed, departures, state_notices
        uint64_t ahead, ahead_error
        uint32_t clocked

    ctypedef struct coordinator_page:
        uint64_t tail
        uint64_t* drained
        uint32_t recording, schedule_full, over

    ctypedef struct rank_page:
        uint64_t arrivals, waits, request_head, steps
        uint32_t wait_all, wait_requests, left, started, entered, blocked, overdue, blocked_anywhere
        uint64_t joined, joined_at
        uint32_t asleep
        uint64_t* need
        uint64_t* unnamed
        uint64_t waits_unnamed
        uint32_t* door
        uint64_t cursor, packed, reduced, copied
        char* reason
        uint64_t* ready
        uint64_t* absent
        uint64_t* awaited
        uint64_t* rows
        uint64_t* brought
        unsigned char* requests

    ctypedef struct member_shape:
        int64_t rows
        int64_t row_bytes
        int64_t dtype

    uint64_t engine_layout()
    bint add_bytes(uint64_t* total, int64_t rows, uint64_t row_bytes)
    bint add_padded_bytes(uint64_t* total, int64_t rows, uint64_t row_bytes, uint64_t alignment)
    bint wire_compresses(int wire, int dtype)
    int wire_dtype(int wire, int dtype)
    const int32_t* entry_ids(const engine_entry* entry)
    const int64_t* entry_rows(const engine_entry* entry)
    uint64_t segment_bytes(uint32_t size)
    coordinator_page* segment_coordinator(segment_header* h)
    uint64_t* segment_schedule(segment_header* h)
    rank_page* segment_page(segment_header* h, int rank)
    char* segment_slot(segment_header* h, int rank, uint64_t chunk)

# The status of a call of the native engine: 0 or negative. It is used by every plane, and never sent between processes.
cdef enum Status:
    OK = 0
    FAILED_WORLD = -1   # the world, or the process set, has failed
    DUPLICATE = -2      # an operation is in flight under the name
    NO_ROOM = -3        # the request ring is full: drive, and try again
    NO_MEMORY = -4
    MISMATCH = -5       # ranks disagree about the operation
    TICK = -6           # not done yet: look for signals and come back
    ABSENT = -7         # no rank has submitted a tensor; not an error
    JOINED = -8         # this rank has joined, and submits nothing until the others have
    AFTER_FAILURE = -9  # a call under this name has failed here, and the others do not know it yet: wait, and try again
    FAILED_CALL = -10   # a rank's call failed before it submitted anything
