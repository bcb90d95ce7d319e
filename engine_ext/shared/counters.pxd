"""The page of counters (counters.h). `page` is NULL where nothing is counted, which costs one branch.

Several engines of a process, the world's and those of process sets, count into one page by atomic additions.
"""
from libc.stdint cimport uint64_t

from engine_ext.shared.layout cimport engine_entry

cdef extern from "engine_ext/shared/counters.h" nogil:
    enum: COUNTERS_BYTES, DURATIONS, GROUPS, GROUP_WORDS, STEP_LOG, STEP_WORDS, ENTRY_LOG, ENTRY_WORDS
    enum: COUNTED_NEW, COUNTED_RUNNING, COUNTED_ENDED, COUNTED_FAILED, COUNTED_RESETTING
    enum: CLOSED_FULL, CLOSED_WHOLE_STEP, CLOSED_AWAITED, CLOSED_CYCLE_TIME, CLOSED_FROZEN, CLOSED_REASONS
    enum: STAGE_NCCL, STAGES
    enum: LATE_INPUT, LATE_COMPUTE, LATE_GC, LATE_CPU, LATE_NETWORK, LATE_RANK, LATE_CAUSES

    ctypedef struct counters_page:
        uint64_t* state
        uint64_t* pid
        uint64_t* rank
        uint64_t* size
        uint64_t* local_rank
        uint64_t* worlds
        uint64_t* started_ns
        uint64_t* cause
        uint64_t* culprit
        uint64_t* collectives
        uint64_t* collective_bytes
        uint64_t* collective_tensors
        uint64_t* collective_ns
        uint64_t* collective_durations
        uint64_t* exposed_ns
        uint64_t* fused_bytes
        uint64_t* fusion_capacity
        uint64_t* queue_ns
        uint64_t* queued
        uint64_t* negotiation_ns
        uint64_t* negotiated
        uint64_t* lag_ns
        uint64_t* lags
        uint64_t* completed
        uint64_t* mismatches
        uint64_t* last_ns
        uint64_t* knob_version
        uint64_t* fusion_threshold
        uint64_t* cycle_time_ns
        uint64_t* stores
        uint64_t* chunk
        uint64_t* compression
        uint64_t* sockets_per_lane
        uint64_t* between_hosts
        uint64_t* compression_saved_bytes
        uint64_t* compression_not_finite
        uint64_t* entries_logged
        uint64_t* entry_log
        uint64_t* submitted
        uint64_t* requests
        uint64_t* blocked_ns
        uint64_t* steps
        uint64_t* step_ns
        uint64_t* step_durations
        uint64_t* steps_logged
        uint64_t* step_log
        uint64_t* late_steps
        uint64_t* late_ns
        uint64_t* late_blind
        uint64_t* cycles
        uint64_t* stall_warnings
        uint64_t* stalled
        uint64_t* network_sent
        uint64_t* network_received
        uint64_t* crossing_ns
        uint64_t* gpu
        uint64_t* device_entries
        uint64_t* device_bytes
        uint64_t* device_enqueued
        uint64_t* device_passed
        uint64_t* device_ns
        uint64_t* device_samples
        uint64_t* device_sampled_bytes
        uint64_t* group_names
        uint64_t* group_ranks
        uint64_t* group_collectives
        uint64_t* group_bytes
        uint64_t* group_ns
        uint64_t* group_completed
        uint64_t* group_submitted

    const char** LATE_NAMES

    void tally(uint64_t* word, uint64_t n)

cdef int counters_map(int fd, counters_page** page) noexcept nogil
cdef void counters_unmap(counters_page* page) noexcept nogil
cdef void counters_end(counters_page* page) noexcept nogil
cdef int counters_put(counters_page* page, const char* name, uint64_t value) noexcept nogil
cdef int counters_write(counters_page* page, const char* name, const char* text, uint64_t nbytes) noexcept nogil
cdef void counters_entry(counters_page* page, const engine_entry* entry, bint fusible, uint64_t started, uint64_t ended,
                         uint64_t exposed) noexcept nogil
cdef int counters_find_place(counters_page* page, int ranks) noexcept nogil
cdef void counters_name_group(counters_page* page, int place, const char* text, uint64_t nbytes) noexcept nogil
cdef void counters_arrival(counters_page* page, uint64_t earliest, uint64_t submitted, uint64_t started) noexcept nogil
cdef uint64_t counters_step(counters_page* page, uint64_t begun) noexcept nogil
cdef void counters_late_step(counters_page* page, int cause, uint64_t excess) noexcept nogil
