"""The coordinator's door to its observers: who submitted a tensor last, which entries a timeline shows, why batches close.

As in observers.pxd, nothing that is told changes what the coordinator does, and each hook names its caller. That holds rank 0's
driver role, and not the lock.
"""
from libc.stdint cimport int32_t, uint32_t, uint64_t

from engine_ext.coordinator.coordinator cimport Coordinator, NameState
from engine_ext.shared.counters cimport tally
from engine_ext.shared.layout cimport ENTRY_BATCH, engine_entry

cdef extern from "platform/cpu.h" nogil:
    void engine_prefetch_read(const void* memory, size_t nbytes)

cdef enum:
    TRACE_LINES_ENTRY = 8       # most lines of a timeline's file that an entry takes, without its tensors
    TRACE_LINES_TENSOR = 3      # most lines that each of its tensors takes

cdef void lateness_decide(Coordinator* c, uint64_t now) noexcept nogil
cdef void lateness_note(Coordinator* c, NameState* name) noexcept nogil
cdef void lateness_append(Coordinator* c, engine_entry* entry, const int32_t* ids) noexcept nogil
cdef uint64_t lateness_earliest(const Coordinator* c, const NameState* name) noexcept nogil
cdef void lateness_count(Coordinator* c, engine_entry* entry, const NameState* last) noexcept nogil

# ---- hooks ------------------------------------------------------------------------------------------------------------------

cdef inline void observe_batch_opens(Coordinator* c, uint64_t now) noexcept nogil:
    """A tensor is ready, and no other one waits. Called by enqueue."""
    lateness_decide(c, now)

cdef inline void observe_found(Coordinator* c, int32_t id) noexcept nogil:
    """All ranks have toggled the bit of `id`. Called by find_ready, some time before the entry is appended."""
    cdef int r
    if c.counters_page != NULL:
        for r in range(c.segment.size):
            engine_prefetch_read(&c.segment.pages[r].brought[id], 8)            # for lateness_count

cdef inline void observe_ready(Coordinator* c, NameState* name, bint first) noexcept nogil:
    """All ranks have brought `name`, by requests if it is the `first` time, which are still open. Called by enqueue."""
    name.ready, name.earliest = 0, 0
    if first and c.counters_page != NULL:
        name.earliest = lateness_earliest(c, name)
    if c.recording:
        lateness_note(c, name)

cdef inline uint32_t observed_words(const NameState* name, int32_t items) noexcept nogil:
    """How many words of an entry are the timeline's; `name` is the first of its `items`."""
    return <uint32_t>items if name.ready else 0

cdef inline void observe_append(Coordinator* c, engine_entry* entry, const int32_t* ids, uint32_t words) noexcept nogil:
    """An entry for `ids`, of which `words` are the timeline's, is about to be appended. Called by append."""
    if words:
        lateness_append(c, entry, ids)
    if c.counters_page != NULL and entry.type == ENTRY_BATCH:
        lateness_count(c, entry, c.by_id[ids[entry.items - 1]])

cdef inline void observe_batch_closes(Coordinator* c, int reason) noexcept nogil:
    """A batch has been appended, for a `reason` that is one of CLOSED_*. Called by close_batches and frozen_close."""
    if c.counters_page != NULL:
        tally(&c.counters_page.cycles[reason], 1)
