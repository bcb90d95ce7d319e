"""Counting into the page of counters (counters.h), which other processes read."""
from libc.errno cimport EINVAL, EPROTO, errno
from libc.stdint cimport uint64_t
from libc.string cimport memcpy

from engine_ext.platform.atomics cimport add64, load_relaxed, now_ns, store_relaxed, store_release
from engine_ext.platform.clock cimport age_ns
from engine_ext.platform.posix cimport (
    MADV_DONTFORK, MAP_FAILED, MAP_SHARED, PROT_READ, PROT_WRITE, madvise, mmap, munmap,
)
from engine_ext.shared.layout cimport ALGORITHMS

cdef extern from "engine_ext/shared/counters.h" nogil:
    int counters_format(counters_page* page)
    uint64_t* counters_field(counters_page* page, const char* name)
    uint64_t* counters_words(counters_page* page, const char* name, uint64_t* words)
    int duration_bucket(uint64_t ns)


cdef int counters_map(int fd, counters_page** page) noexcept nogil:
    """Map a page, and format it if it is new. Return 0, a negative errno, or -EPROTO for a page of another build."""
    cdef void* memory = mmap(NULL, COUNTERS_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0)
    if memory == MAP_FAILED:
        return -errno
    madvise(memory, COUNTERS_BYTES, MADV_DONTFORK)
    if not counters_format(<counters_page*>memory):
        munmap(memory, COUNTERS_BYTES)
        return -EPROTO
    page[0] = <counters_page*>memory
    return 0


cdef void counters_unmap(counters_page* page) noexcept nogil:
    """Unmap a page; NULL: do nothing."""
    if page != NULL:
        munmap(page, COUNTERS_BYTES)


cdef void counters_end(counters_page* page) noexcept nogil:
    """Note that the process ends, unless it has failed before."""
    if page != NULL and load_relaxed(page.state) == COUNTED_RUNNING:
        store_relaxed(page.state, COUNTED_ENDED)
        store_relaxed(page.stalled, 0)


cdef int counters_put(counters_page* page, const char* name, uint64_t value) noexcept nogil:
    """Set a field of one word by its name. Return 0, or -EINVAL if there is no such field."""
    cdef uint64_t* word = counters_field(page, name)
    if word == NULL:
        return -EINVAL
    store_relaxed(word, value)
    return 0


cdef void write_text(uint64_t* field, uint64_t words, const char* text, uint64_t nbytes) noexcept nogil:
    """Write a text into `words` words, cut to fit, with a zero behind it."""
    cdef uint64_t k, word
    nbytes = min(nbytes, 8 * words - 1)
    for k in range(words):
        word = 0
        if 8 * k < nbytes:
            memcpy(&word, text + 8 * k, min(nbytes - 8 * k, <uint64_t>8))
        store_relaxed(&field[k], word)


cdef int counters_write(counters_page* page, const char* name, const char* text, uint64_t nbytes) noexcept nogil:
    """Set a field of several words to a text, cut to fit, with a zero behind it. Return 0, or -EINVAL if there is no such
    field."""
    cdef uint64_t words = 0
    cdef uint64_t* field = counters_words(page, name, &words)
    if field == NULL:
        return -EINVAL
    write_text(field, words, text, nbytes)
    return 0


cdef void log_row(uint64_t* row, uint64_t number, uint64_t begun, uint64_t ended, uint64_t a, uint64_t b) noexcept nogil:
    """Write a row of a log. The number is 0 meanwhile, so that a reader leaves the row out. If the stores become visible in
    another order, it may still see a row of two moments, as with any words of the page."""
    store_release(&row[0], 0)
    store_relaxed(&row[1], begun)
    store_relaxed(&row[2], ended)
    store_relaxed(&row[3], a)
    store_relaxed(&row[4], b)
    store_release(&row[0], number + 1)


cdef void counters_entry(counters_page* page, const engine_entry* entry, bint fusible, uint64_t started, uint64_t ended,
                         uint64_t exposed) noexcept nogil:
    """Count an entry that moved data, at its end. `fusible`: the fusion threshold applies to it."""
    cdef int kind = entry.kind, which = kind * ALGORITHMS + entry.algorithm
    cdef uint64_t ns = age_ns(ended, started), number
    tally(&page.collectives[which], 1)
    tally(&page.collective_bytes[which], entry.bytes)
    tally(&page.collective_tensors[kind], entry.items)
    if not entry.meta.device:           # there this rank has only handed the work over
        tally(&page.collective_ns[which], ns)
        tally(&page.collective_durations[kind * DURATIONS + duration_bucket(ns)], 1)
        if exposed:
            tally(page.exposed_ns, exposed)
        number = add64(page.entries_logged, 1)
        log_row(&page.entry_log[number % ENTRY_LOG * ENTRY_WORDS], number, started, ended, entry.bytes, <uint64_t>which)
    if fusible:
        tally(page.fused_bytes, entry.bytes)
        tally(page.fusion_capacity, max(entry.bytes, entry.knobs.fusion_threshold))
    store_relaxed(page.last_ns, ended)


# ---- groups: the caller holds the lock of the world --------------------------------------------------------------------------

cdef int counters_find_place(counters_page* page, int ranks) noexcept nogil:
    """Return a free place for a group of `ranks` ranks, with its counters set to 0; -1: there is none."""
    cdef int k
    for k in range(GROUPS):
        if load_relaxed(&page.group_names[k * GROUP_WORDS]) == 0:
            store_relaxed(&page.group_ranks[k], <uint64_t>ranks)
            store_relaxed(&page.group_collectives[k], 0)
            store_relaxed(&page.group_bytes[k], 0)
            store_relaxed(&page.group_ns[k], 0)
            store_relaxed(&page.group_completed[k], 0)
            store_relaxed(&page.group_submitted[k], 0)
            return k
    return -1


cdef void counters_name_group(counters_page* page, int place, const char* text, uint64_t nbytes) noexcept nogil:
    """Name the group in a place. An empty text frees the place."""
    write_text(&page.group_names[place * GROUP_WORDS], GROUP_WORDS, text, nbytes)


cdef void counters_arrival(counters_page* page, uint64_t earliest, uint64_t submitted, uint64_t started) noexcept nogil:
    """Count a sampled entry at its end: this rank submitted its sampled tensor at `submitted`, the first rank at `earliest` (0:
    not known by this host's clock), and the entry started at `started`."""
    tally(page.queue_ns, age_ns(started, submitted))
    tally(page.queued, 1)
    if earliest:
        tally(page.lag_ns, age_ns(submitted, earliest))
        tally(page.lags, 1)


cdef uint64_t counters_step(counters_page* page, uint64_t begun) noexcept nogil:
    """Count a step that has ended. `begun`: its start; 0: the first step. Return the start of the next one: now."""
    cdef uint64_t now = now_ns(), number
    tally(page.steps, 1)
    if begun:
        tally(page.step_ns, age_ns(now, begun))
        tally(&page.step_durations[duration_bucket(age_ns(now, begun))], 1)
        number = add64(page.steps_logged, 1)
        log_row(&page.step_log[number % STEP_LOG * STEP_WORDS], number, begun, now, load_relaxed(page.blocked_ns),
                load_relaxed(page.exposed_ns))
    return now


cdef void counters_late_step(counters_page* page, int cause, uint64_t excess) noexcept nogil:
    """Count a late step."""
    tally(&page.late_steps[cause], 1)
    tally(&page.late_ns[cause], excess)
