"""Validation of entries and requests from other hosts: every number in them that is a length, an index or a row of a table has to
be in range. Ranks read them unchecked, as they read those of their own host. A wrong number here ends the connection instead.

A rank itself checks before it executes an entry what only it can judge by its submissions (entry_fits). Numbers that come with
the data are unknown here: the operation that uses them checks them (`culprit`, data/executor.pxd). All numbers are added and
multiplied by add_bytes of layout.h.
"""
from libc.stdint cimport int32_t, int64_t, uint32_t
from libc.string cimport memset

from engine_ext.kernels.kernels cimport (
    ENGINE_ADASUM, ENGINE_ALL_DTYPES, ENGINE_AVERAGE, ENGINE_DTYPES, ENGINE_FLOAT64, ENGINE_NO_SOURCE, dtype_bytes,
    engine_reduction, engine_reduction_check,
)
from engine_ext.operations.allreduce cimport carrier_can_sum
from engine_ext.operations.blocks cimport can_be_chosen
from engine_ext.operations.kinds cimport can_be_coded, operation_of
from engine_ext.operations.operation cimport SAYS_ALIGNED, SAYS_ROWS, Operation, bytes_of_row, is_whole_chunk
from engine_ext.shared.layout cimport (
    ALGORITHMS, ALGORITHM_BLOCKS, ALGORITHM_CARRIER, ALGORITHM_DEVICE, ALGORITHM_SHARED, BATCH_ITEMS, BETWEENS, DIM_MOVED,
    DIM_SPARSE, ENTRY_ALIGN, ENTRY_BATCH, ENTRY_DEFINE, ENTRY_ERROR, ENTRY_EVICT, ENTRY_JOINED, ENTRY_MEMBERS, ENTRY_PAD,
    ENTRY_SKIP, ENTRY_TURN, FAILURE_BYTES, FAULT_CALL, IDS, ID_WORDS, KINDS, LAYOUT_SPARSE, MAX_DIMS, MAX_GROUP,
    MAX_SOCKETS, NAME_BYTES, REQUEST_BYTES, SLOT_BYTES, STORES, WIRES, WIRE_FP8, WIRE_TUNED, WIRE_TUNED8, add_bytes,
    engine_entry, engine_knobs, engine_meta, engine_request, entry_ids, entry_rows, rank_page,
)
from engine_ext.shared.segment cimport arrival_last, place_of

cdef double LONGEST_CYCLE_MS = 10000        # the longest that a user may set (engine_ext/snapshots.pyx)


cdef inline bint is_id(int32_t id) noexcept nogil:
    return 0 <= id < IDS


# ---- metadata ----------------------------------------------------------------------------------------------------------------

cdef bint shape_is_valid(const engine_meta* meta) noexcept nogil:
    """Return whether a shape received from another host has no negative dimension and no byte count that overflows."""
    cdef uint64_t total = 0
    cdef uint64_t items = 1
    cdef bint empty = False
    cdef uint32_t d
    for d in range(meta.ndim if meta.group == 0 or meta.layout == LAYOUT_SPARSE else <uint32_t>DIM_MOVED + 1):
        if meta.dims[d] < 0:
            return False
    if meta.layout == LAYOUT_SPARSE:        # indices and values
        return operation_of(meta).says == SAYS_ROWS and meta.group == 2 and 0 <= meta.dims[DIM_SPARSE] <= MAX_DIMS
    if operation_of(meta).uneven:
        return True             # row counts come with each entry: row_counts_are_valid and their operation check them
    if meta.group:
        for d in range(ENGINE_DTYPES):
            if not add_bytes(&total, meta.dims[d], <uint64_t>dtype_bytes(<int>d)):
                return False
        return True
    for d in range(meta.ndim):
        empty |= meta.dims[d] == 0
    for d in range(0 if empty else meta.ndim):
        total = 0
        if not add_bytes(&total, meta.dims[d], items):
            return False
        items = total
    total = 0
    return empty or add_bytes(&total, <int64_t>items, <uint64_t>dtype_bytes(meta.dtype))


cdef bint can_reduce(const engine_meta* meta, int dtype, int size) noexcept nogil:
    """Return whether there are kernels for a tensor of that dtype."""
    cdef engine_reduction reduction
    if meta.op == ENGINE_ADASUM:
        return (operation_of(meta).tells_members and not operation_of(meta).parts and dtype <= ENGINE_FLOAT64
                and size & (size - 1) == 0)
    memset(&reduction, 0, sizeof(reduction))
    reduction.op, reduction.tensor, reduction.dtype = meta.op, dtype, dtype
    reduction.count, reduction.copies, reduction.unscaled = size, 1, ENGINE_NO_SOURCE
    reduction.prescale, reduction.postscale = meta.prescale, meta.postscale
    reduction.divisor = size if meta.op == ENGINE_AVERAGE else 1
    return engine_reduction_check(&reduction) == 0


cdef bint has_sound_reduction(const engine_meta* meta, int size) noexcept nogil:
    """Return whether all tensors of a description can be reduced, if its operation reduces."""
    cdef int d
    if meta.fault == FAULT_CALL or not operation_of(meta).reduces:      # a failed call only has a name
        return True
    if meta.dtype >= ENGINE_DTYPES:
        return False
    if meta.group == 0:
        return can_reduce(meta, meta.dtype, size)
    for d in range(ENGINE_DTYPES):
        if meta.dims[d] and not can_reduce(meta, d, size):
            return False
    return meta.dims[DIM_MOVED] == 0


cdef inline bint is_wire(int wire) noexcept nogil:
    return wire < WIRES or wire == WIRE_TUNED or wire == WIRE_TUNED8


cdef bint meta_is_valid(const engine_meta* meta, int size) noexcept nogil:
    """Return whether a description's numbers are in range and fit together."""
    return (meta.kind < KINDS and meta.op <= ENGINE_ADASUM and operation_of(meta) != NULL and meta.dtype < ENGINE_ALL_DTYPES
            and meta.layout <= LAYOUT_SPARSE and meta.ndim <= MAX_DIMS and meta.fault <= FAULT_CALL and meta.shared >= -1
            and meta.device <= 1 and meta.group <= MAX_GROUP and is_wire(meta.wire)
            and (meta.wire != WIRE_FP8 or can_be_coded(meta)) and shape_is_valid(meta) and has_sound_reduction(meta, size))


# ---- entries -----------------------------------------------------------------------------------------------------------------

cdef bint knobs_are_valid(const engine_knobs* knobs) noexcept nogil:
    """Return whether the knobs in an entry are in their ranges."""
    return (0 <= knobs.cycle_time_ms <= LONGEST_CYCLE_MS and 0 < knobs.chunk_bytes <= SLOT_BYTES and knobs.stores < STORES
            and knobs.compression < WIRES and 1 <= knobs.sockets_per_lane <= MAX_SOCKETS and knobs.between_hosts < BETWEENS)


cdef bint ids_are_valid(const engine_entry* entry) noexcept nogil:
    """Return whether the ids of a BATCH or a SKIP are in range and distinct."""
    cdef uint64_t[ID_WORDS] seen
    cdef int32_t id
    cdef uint32_t i
    memset(seen, 0, sizeof(seen))
    for i in range(entry.items):
        id = entry_ids(entry)[i]
        if not is_id(id) or seen[id >> 6] >> (id & 63) & 1:
            return False
        seen[id >> 6] |= <uint64_t>1 << (id & 63)
    return True


cdef bint row_counts_are_valid(const Segment* segment, const engine_entry* entry) noexcept nogil:
    """Return whether the row counts that a BATCH or a SKIP lists by rank are not negative, and their bytes do not overflow."""
    cdef uint64_t total = 0
    cdef int r
    for r in range(segment.size if operation_of(&entry.meta).says == SAYS_ROWS else 0):
        if not rows_are_valid(<uint64_t>entry_rows(entry)[r]) or not add_bytes(
                &total, entry_rows(entry)[r], <uint64_t>bytes_of_row(&entry.meta)):
            return False
    return True


cdef bint unnamed_counts_are_valid(const engine_entry* entry) noexcept nogil:
    """Return whether a barrier's counts of unnamed operations are in range, and only a barrier has them."""
    cdef int kind
    for kind in range(KINDS if entry.flags & ENTRY_ALIGN else 0):
        if not 0 <= entry.meta.dims[kind] < <int64_t>1 << 62:
            return False
    return entry.flags & ENTRY_ALIGN == 0 or operation_of(&entry.meta).says == SAYS_ALIGNED


cdef bint arrivals_are_valid(const Segment* segment, const engine_entry* entry) noexcept nogil:
    """Return whether the arrivals of an entry, and those at the end of a recorded one, name ranks in range, or none."""
    cdef const uint64_t* arrivals = <const uint64_t*>entry + entry.words - entry.items
    cdef uint32_t i
    if arrival_last(entry.arrival) >= segment.size:
        return False
    for i in range(entry.items if entry.closed else 0):
        if arrival_last(arrivals[i]) >= segment.size:
            return False
    return True


cdef bint batch_is_valid(const Segment* segment, const engine_entry* entry) noexcept nogil:
    """Return whether a BATCH or a SKIP is valid: its description, and what follows its header."""
    cdef const Operation* operation
    cdef uint64_t least
    if not meta_is_valid(&entry.meta, segment.size) or entry.kind != entry.meta.kind or entry.meta.wire >= WIRES:
        return False
    operation = operation_of(&entry.meta)
    if not 1 <= entry.items <= BATCH_ITEMS or (operation.alone and entry.items != 1):
        return False
    least = sizeof(engine_entry) // 8 + (<uint64_t>entry.items + 1) // 2
    if operation.says == SAYS_ROWS:
        least += <uint64_t>segment.size
    if entry.words != least + entry.items and (entry.words != least or entry.closed):
        return False
    if not (ids_are_valid(entry) and row_counts_are_valid(segment, entry) and unnamed_counts_are_valid(entry)
            and arrivals_are_valid(segment, entry)):
        return False
    if entry.flags & ENTRY_MEMBERS and not (
            (operation.tells_members or entry.meta.wire == WIRE_FP8) and 0 <= entry.id < segment.size):
        return False
    if entry.type == ENTRY_SKIP or not operation.moves:
        return True
    return (is_whole_chunk(entry.chunk) and entry.meta.shared == -1 and entry.algorithm != ALGORITHM_SHARED
            and (entry.algorithm == ALGORITHM_DEVICE) == (entry.meta.device != 0)
            and (entry.algorithm != ALGORITHM_CARRIER or (segment.crews.summing and carrier_can_sum(&entry.meta)))
            and (entry.meta.wire == WIRE_FP8 or entry.algorithm != ALGORITHM_BLOCKS)
            and (entry.meta.wire != WIRE_FP8 or (segment.hosts > 1 and can_be_chosen(entry)))
            and (not operation.rooted or place_of(segment, entry.meta.root) >= 0))


cdef bint entry_is_valid(const Segment* segment, const engine_entry* entry) noexcept nogil:
    """Return whether an entry other than a pad is valid; its words are there. Fields that every rank notes are checked in all
    types."""
    cdef uint64_t room = <uint64_t>entry.words * 8 - sizeof(engine_entry)
    if not (knobs_are_valid(&entry.knobs) and entry.kind < KINDS and entry.algorithm < ALGORITHMS and entry.stores < STORES
            and is_wire(entry.meta.wire)):
        return False
    if entry.type == ENTRY_BATCH or entry.type == ENTRY_SKIP:
        return batch_is_valid(segment, entry)
    if not 0 <= entry.name_bytes <= NAME_BYTES or <uint64_t>entry.name_bytes > room:
        return False
    if entry.type == ENTRY_DEFINE:
        return is_id(entry.id) and meta_is_valid(&entry.meta, segment.size)
    if entry.type == ENTRY_ERROR:
        return ((entry.id == -1 or is_id(entry.id)) and entry.bytes <= room and <uint64_t>entry.name_bytes + entry.bytes <= room
                and 0 <= entry.meta.root <= segment.size)
    if entry.type == ENTRY_EVICT:
        return is_id(entry.id)
    if entry.type == ENTRY_TURN:
        return segment.world == segment and entry.id > 0
    return entry.type == ENTRY_JOINED and place_of(segment, entry.id) >= 0


cdef bint entries_are_valid(const Segment* segment, const uint64_t* words, uint64_t count) noexcept nogil:
    """Return whether `count` words of the schedule are whole entries that ranks of this host can execute."""
    cdef const engine_entry* entry
    while count:
        entry = <const engine_entry*>words      # a pad may be shorter: only its first word is read
        if not 1 <= entry.words <= count:
            return False
        if entry.type != ENTRY_PAD and (entry.words < sizeof(engine_entry) // 8 or not entry_is_valid(segment, entry)):
            return False
        words += entry.words
        count -= entry.words
    return True


cdef bint rows_are_valid(uint64_t rows) noexcept nogil:
    """Return whether `rows` is not negative. Rows without bytes may be any number; add_bytes bounds the others."""
    return <int64_t>rows >= 0


cdef bint range_is_valid(uint64_t position, uint64_t count, uint64_t first, uint64_t room) noexcept nogil:
    """Return whether `count` places of a ring from `position` on are among the `room` places from `first` on. Positions count
    since the start. Nothing is added to one: it may be near the end of its type."""
    return position >= first and count <= room and position - first <= room - count


# ---- requests ------------------------------------------------------------------------------------------------------------------

cdef bint request_is_valid(const Segment* segment, const engine_request* request) noexcept nogil:
    """Return whether a request is valid; its header is there."""
    cdef uint32_t length = <uint32_t>sizeof(engine_request) + request.name_bytes + request.text_bytes
    return (request.name_bytes <= NAME_BYTES and request.text_bytes <= FAILURE_BYTES
            and (request.turn == 0 or (request.turn > 0 and length == sizeof(engine_request) and segment.world == segment))
            and request.bytes == (length + 7) & ~<uint32_t>7 and (request.text_bytes == 0 or request.meta.fault == FAULT_CALL)
            and rows_are_valid(<uint64_t>request.rows) and meta_is_valid(&request.meta, segment.size))


cdef bint requests_are_valid(const Segment* segment, int rank, uint64_t begin, uint64_t end) noexcept nogil:
    """Return whether the request ring of a rank has whole valid requests from position `begin` to `end`."""
    cdef const rank_page* page = segment.pages[rank]
    cdef const engine_request* request
    cdef uint64_t left, step
    if end < begin or end - begin > REQUEST_BYTES or (begin | end) & 7:
        return False
    while begin < end:
        request = <const engine_request*>(<const unsigned char*>page.requests + begin % REQUEST_BYTES)
        left = REQUEST_BYTES - begin % REQUEST_BYTES
        if request.bytes == 0:
            step = left
        elif left < sizeof(engine_request) or request.bytes > left or not request_is_valid(segment, request):
            return False
        else:
            step = request.bytes
        if step > end - begin:
            return False
        begin += step
    return True
