"""The interface between the coordinator and its observers: which rank submitted a tensor last, which entries a timeline shows,
why batches close.

As in observers.pxd, no observer changes what the coordinator does, and each hook names its caller. The caller holds rank 0's
driver role, and not the lock.
"""
from libc.stdint cimport int32_t, uint32_t, uint64_t

from engine_ext.coordinator.coordinator cimport Coordinator, NameState
from engine_ext.shared.counters cimport tally
from engine_ext.shared.layout cimport ENTRY_BATCH, engine_entry

cdef extern from "platform/cpu.h" nogil:
    void engine_prefetch_read(const void* memory, size_t nbytes)

cdef enum:
    TRACE_LINES_ENTRY = 8       # most lines that an entry takes in a timeline's file, without its tensors
    TRACE_LINES_TENSOR = 3      # most lines that each of its tensors takes there

cdef void lateness_decide(Coordinator* c, uint64_t now) noexcept nogil
cdef void lateness_note(Coordinator* c, NameState* name) noexcept nogil
cdef void lateness_append(Coordinator* c, engine_entry* entry, const int32_t* ids) noexcept nogil
cdef uint64_t lateness_find(const Coordinator* c, const NameState* name, uint64_t* latest) noexcept nogil
cdef void lateness_count(Coordinator* c, engine_entry* entry, NameState* last) noexcept nogil

# ---- hooks ------------------------------------------------------------------------------------------------------------------

cdef inline void observe_batch_opens(Coordinator* c, uint64_t now) noexcept nogil:
    """Note that a tensor is ready while no other one waits. Called by enqueue."""
    lateness_decide(c, now)

cdef inline void observe_found(Coordinator* c, int32_t id) noexcept nogil:
    """Note that all ranks have toggled the bit of `id`. Called by find_ready, some time before the entry is appended."""
    cdef int r
    if c.counters_page != NULL:
        for r in range(c.segment.size):
            engine_prefetch_read(&c.segment.pages[r].brought[id], 8)            # for lateness_count

cdef inline void observe_ready(Coordinator* c, NameState* name, bint first) noexcept nogil:
    """Note that all ranks have submitted `name`; the `first` time by requests, which are still open. Called by enqueue."""
    name.ready, name.earliest = 0, 0
    if first and c.counters_page != NULL:
        name.earliest = lateness_find(c, name, &name.latest)
    if c.recording:
        lateness_note(c, name)

cdef inline uint32_t observed_words(const NameState* name, int32_t items) noexcept nogil:
    """Return how many words of an entry belong to the timeline; `name` is the first of its `items`."""
    return <uint32_t>items if name.ready else 0

cdef inline void observe_append(Coordinator* c, engine_entry* entry, const int32_t* ids, uint32_t words) noexcept nogil:
    """Complete an entry for `ids` before it is appended; `words` of it belong to the timeline. Called by append."""
    if words:
        lateness_append(c, entry, ids)
    if c.counters_page != NULL and entry.type == ENTRY_BATCH:
        lateness_count(c, entry, c.by_id[ids[entry.items - 1]])

cdef inline void observe_batch_closes(Coordinator* c, int reason) noexcept nogil:
    """Count a batch that was appended for `reason`, one of CLOSED_*. Called by close_batches and frozen_close."""
    if c.counters_page != NULL:
        tally(&c.counters_page.cycles[reason], 1)
