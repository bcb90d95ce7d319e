"""Entries and requests that come from other hosts: whether every number in them that is a length, an index or a row of a table is
one. Ranks read them without a look, as they read those of their own host; what is wrong here ends the connection instead.
"""
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from engine_ext.kernels.kernels cimport ENGINE_ADASUM, ENGINE_ALL_DTYPES, ENGINE_DTYPES
from engine_ext.operations.kinds cimport operation_of
from engine_ext.operations.operation cimport SAYS_ROWS, Operation
from engine_ext.shared.layout cimport (
    ALGORITHMS, ALGORITHM_DEVICE, ALGORITHM_MPI, ALGORITHM_SHARED, BATCH_ITEMS, ENTRY_BATCH, ENTRY_DEFINE, ENTRY_ERROR,
    ENTRY_EVICT, ENTRY_JOINED, ENTRY_MEMBERS, ENTRY_PAD, ENTRY_SKIP, ENTRY_TURN, FAILURE_BYTES, FAULT_CALL, IDS, KINDS,
    LAYOUT_SPARSE, MAX_DIMS, MAX_SOCKETS, NAME_BYTES, REQUEST_BYTES, SLOT_BYTES, STORES_AUTO, WIRES, WIRE_TUNED, engine_entry,
    engine_meta, engine_request, entry_ids, entry_rows,
)
from engine_ext.shared.segment cimport place_of

cdef enum:
    ROWS_BITS = 48              # no rank has as many rows as that


cdef inline bint is_id(int32_t id) noexcept nogil:
    return 0 <= id < IDS


cdef bint is_meta(const engine_meta* meta) noexcept nogil:
    return (meta.kind < KINDS and meta.op <= ENGINE_ADASUM and operation_of(meta) != NULL and meta.dtype < ENGINE_ALL_DTYPES
            and (meta.dtype < ENGINE_DTYPES or not operation_of(meta).reduces)
            and meta.layout <= LAYOUT_SPARSE and meta.ndim <= MAX_DIMS and meta.fault <= FAULT_CALL and meta.shared >= -1
            and (meta.wire < WIRES or meta.wire == WIRE_TUNED))


cdef bint is_batch(const Segment* segment, const engine_entry* entry) noexcept nogil:
    """A BATCH or a SKIP: what describes it, and what follows its header."""
    cdef const Operation* operation
    cdef uint64_t least
    cdef uint32_t i
    cdef int r
    if not is_meta(&entry.meta) or entry.kind != entry.meta.kind or entry.meta.wire >= WIRES:
        return False
    if not 1 <= entry.items <= BATCH_ITEMS or not 1 <= entry.knobs.sockets_per_lane <= MAX_SOCKETS:
        return False
    operation = operation_of(&entry.meta)
    least = sizeof(engine_entry) // 8 + (<uint64_t>entry.items + 1) // 2
    if operation.says == SAYS_ROWS:
        least += <uint64_t>segment.size
    if entry.words != least + entry.items and (entry.words != least or entry.closed):
        return False
    for i in range(entry.items):
        if not is_id(entry_ids(entry)[i]):
            return False
    for r in range(segment.size if operation.says == SAYS_ROWS else 0):
        if not 0 <= entry_rows(entry)[r] < <int64_t>1 << ROWS_BITS:
            return False
    if entry.flags & ENTRY_MEMBERS and not 0 <= entry.id < segment.size:
        return False
    if entry.type == ENTRY_SKIP or not operation.moves:
        return True
    return (entry.algorithm < ALGORITHMS and entry.stores <= STORES_AUTO
            and (entry.algorithm == ALGORITHM_SHARED or 0 < entry.chunk <= SLOT_BYTES)
            and (entry.algorithm == ALGORITHM_DEVICE) == (entry.meta.device != 0)
            and (entry.algorithm != ALGORITHM_MPI or segment.crews.summing)
            and (not operation.rooted or place_of(segment, entry.meta.root) >= 0))


cdef bint is_entry(const Segment* segment, const engine_entry* entry) noexcept nogil:
    """An entry other than a pad, whose words are there."""
    cdef uint64_t room = <uint64_t>entry.words * 8 - sizeof(engine_entry)
    if entry.type == ENTRY_BATCH or entry.type == ENTRY_SKIP:
        return is_batch(segment, entry)
    if entry.type == ENTRY_DEFINE:
        return (is_id(entry.id) and 0 <= entry.name_bytes <= NAME_BYTES and <uint64_t>entry.name_bytes <= room
                and is_meta(&entry.meta))
    if entry.type == ENTRY_ERROR:
        return ((entry.id == -1 or is_id(entry.id)) and 0 <= entry.name_bytes <= NAME_BYTES and entry.bytes <= room
                and <uint64_t>entry.name_bytes + entry.bytes <= room)
    if entry.type == ENTRY_EVICT:
        return is_id(entry.id)
    if entry.type == ENTRY_TURN:
        return segment.world == segment and entry.id > 0
    return entry.type == ENTRY_JOINED and place_of(segment, entry.id) >= 0


cdef bint foreign_entries(const Segment* segment, const uint64_t* words, uint64_t count) noexcept nogil:
    """Whether `count` words of the schedule are whole entries that ranks of this host can execute."""
    cdef const engine_entry* entry
    while count:
        entry = <const engine_entry*>words      # of a pad, which may be shorter, the first word alone is there
        if not 1 <= entry.words <= count:
            return False
        if entry.type != ENTRY_PAD and (entry.words < sizeof(engine_entry) // 8 or not is_entry(segment, entry)):
            return False
        words += entry.words
        count -= entry.words
    return True


cdef bint foreign_rows(uint64_t rows) noexcept nogil:
    """Whether a rank can have so many rows."""
    return rows < <uint64_t>1 << ROWS_BITS


cdef bint is_request(const engine_request* request) noexcept nogil:
    cdef uint32_t length = <uint32_t>sizeof(engine_request) + request.name_bytes + request.text_bytes
    return (request.name_bytes <= NAME_BYTES and request.text_bytes <= FAILURE_BYTES
            and (request.turn == 0 or (request.turn > 0 and length == sizeof(engine_request)))
            and request.bytes == (length + 7) & ~<uint32_t>7 and (request.text_bytes == 0 or request.meta.fault == FAULT_CALL)
            and 0 <= request.rows < <int64_t>1 << ROWS_BITS and is_meta(&request.meta))


cdef bint foreign_requests(const rank_page* page, uint64_t begin, uint64_t end) noexcept nogil:
    """Whether the request ring of a page has whole requests from position `begin` to `end`."""
    cdef const engine_request* request
    cdef uint64_t left, step
    if end < begin or end - begin > REQUEST_BYTES or (begin | end) & 7:
        return False
    while begin < end:
        request = <const engine_request*>(<const unsigned char*>page.requests + begin % REQUEST_BYTES)
        left = REQUEST_BYTES - begin % REQUEST_BYTES
        if request.bytes == 0:
            step = left
        elif left < sizeof(engine_request) or request.bytes > left or not is_request(request):
            return False
        else:
            step = request.bytes
        if step > end - begin:
            return False
        begin += step
    return True
