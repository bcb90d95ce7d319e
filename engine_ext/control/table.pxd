"""Names on one rank: the ids by which the coordinator knows them, and the operations in flight under them."""
from libc.stdint cimport int32_t, uint32_t, uint64_t

from engine_ext.coordinator.names cimport Names
from engine_ext.operations.op cimport Op, Record
from engine_ext.platform.clock cimport patience
from engine_ext.shared.layout cimport engine_meta
from engine_ext.shared.segment cimport Segment

cdef struct Table:
    Segment* segment
    const patience* clock
    Names names
    Record** by_id
    Op* inflight        # list of all operations in flight, newest first; heads are stored like a record's `inflight`
    Op* failures        # list of failed calls that this rank announces; no thread waits for them
    uint64_t inflight_count
    # Atomic, written under the lock: how often a name with operations in the backlog became free, or an operation came to the
    # backlog for want of room alone, since backlog_submit last tried all; 0: it has nothing to try.
    uint32_t released

cdef int table_open(Table* table, Segment* segment, const patience* clock) noexcept nogil
cdef void table_close(Table* table) noexcept nogil
cdef Record* table_record(Table* table, const char* name, uint32_t name_bytes) noexcept nogil
cdef void table_release(Table* table, Record* record) noexcept nogil
cdef int table_request_turn(Table* table, int number) noexcept nogil
cdef int table_submit(Table* table, Record* record, Op* op, uint64_t now) noexcept nogil
cdef void table_await(Table* table, Op* op, bint on) noexcept nogil
cdef void table_finish(Table* table, Op* op, int status) noexcept nogil
cdef void table_toggle(Table* table, int32_t id) noexcept nogil
cdef bint table_stand_in(Table* table, Record* record) noexcept nogil
cdef void table_dismiss(Op* op) noexcept nogil
cdef bint table_define(Table* table, int32_t id, const char* name, uint32_t name_bytes, const engine_meta* meta) noexcept nogil
cdef int table_evict(Table* table, int32_t id) noexcept nogil
cdef bint table_brought_by_all(Table* table, int32_t id) noexcept nogil
