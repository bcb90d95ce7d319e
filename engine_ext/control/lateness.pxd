"""Who brought a tensor last, and which entries a timeline shows: decided by the coordinator."""
from libc.stdint cimport int32_t, uint32_t, uint64_t

from engine_ext.control.coordinator cimport Coordinator, NameState
from engine_ext.shared.layout cimport engine_entry

# An arrival is a word: the rank that was last, plus 1 (12 bits; 0: not known); microseconds from when all ranks had brought
# the tensor to when its batch was closed (20 bits, saturating); microseconds from the first rank to the last (32 bits).
cdef enum:
    ARRIVAL_LAST_BITS = 12
    ARRIVAL_WAIT_BITS = 20

cdef void lateness_decide(Coordinator* c, uint64_t now) noexcept nogil
cdef void lateness_note(Coordinator* c, NameState* name) noexcept nogil
cdef void lateness_append(Coordinator* c, engine_entry* entry, const int32_t* ids) noexcept nogil
cdef uint64_t lateness_earliest(const Coordinator* c, const NameState* name) noexcept nogil
cdef void lateness_count(Coordinator* c, engine_entry* entry, const NameState* last) noexcept nogil

cdef inline int arrival_last(uint64_t arrival) noexcept nogil:
    """The rank, or -1."""
    return <int>(arrival & ((1 << ARRIVAL_LAST_BITS) - 1)) - 1

cdef inline uint64_t arrival_wait_us(uint64_t arrival) noexcept nogil:
    return arrival >> ARRIVAL_LAST_BITS & ((1 << ARRIVAL_WAIT_BITS) - 1)

cdef inline uint64_t arrival_late_us(uint64_t arrival) noexcept nogil:
    return arrival >> (ARRIVAL_LAST_BITS + ARRIVAL_WAIT_BITS)
