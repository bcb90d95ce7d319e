/* The page of counters: what a rank has done, in memory that its launcher, or a tool that attaches, may read at any time, also
 * after the rank has died.
 *
 *   header (64 bytes) | table of fields and names (text) | fields, 64-bit words
 *
 * Every word is written with relaxed atomics, and other processes only read: no locks, no order between words. The page describes
 * itself, so a reader shares only the header's layout with us. The table has a line "name offset words" for each field, with the
 * offset in bytes from the page's start. It also has the lines of NAMES_TEXT (names.h), which name the numbers in the fields.
 * Fields of different writers lie in different cache lines.
 */
#ifndef ENGINE_SHARED_COUNTERS_H
#define ENGINE_SHARED_COUNTERS_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "engine_ext/shared/layout.h"

static const char *const LATE_NAMES[] = {LATE_LIST(AS_NAME)};

#define COUNTERS_MAGIC 0x3152544e43474e45u /* "ENGCNTR1" */

enum {
  COUNTERS_VERSION = 5, /* changes with the header, and with the meaning of a field */
  COUNTERS_BYTES = 24576,
  COUNTERS_TABLE = 64,  /* offset of the table */
  COUNTERS_FIELDS = 3072,
  HOST_WORDS = 8,       /* 64-bit words of a host's name */
  GROUPS = 64,          /* number of groups that are counted one by one: process sets, and groups of torch */
  GROUP_WORDS = 8,      /* 64-bit words of a group's name */
  STEP_LOG = 32,        /* number of steps that are remembered one by one */
  STEP_WORDS = 5,       /* words of such a row: 1 + its number, begin, end (CLOCK_MONOTONIC), blocked_ns, exposed_ns then */
  ENTRY_LOG = 64,       /* number of entries that are remembered one by one */
  ENTRY_WORDS = 5,      /* words of such a row: 1 + its number, begin and end, bytes, place in `collectives` */
  DURATIONS = 40        /* bucket k counts durations below 2^k ns and from 2^(k-1) on; the last one all longer ones */
};
enum { COUNTED_LIST(AS_NUMBER) };
enum { CLOSED_LIST(AS_NUMBER) CLOSED_REASONS };
enum { PHASE_LIST(AS_NUMBER) };
enum { STAGE_LIST(AS_NUMBER) STAGES };
enum { LATE_LIST(AS_NUMBER) LATE_CAUSES };

/* LINE begins the cache lines of a new writer; FIELD continues them. */
#define COUNTERS_LAYOUT(LINE, FIELD)                                                                                         \
  LINE(state, 1)                  /* COUNTED_* (cache line written by Python, at start and end) */                           \
  FIELD(pid, 1)                   /* process number of the rank */                                                           \
  FIELD(rank, 1)                  /* rank in its world; likewise the next two */                                             \
  FIELD(size, 1)                                                                                                             \
  FIELD(local_rank, 1)                                                                                                       \
  FIELD(host, 1)                  /* number of the rank's host */                                                            \
  FIELD(hosts, 1)                 /* number of hosts in the world */                                                         \
  FIELD(host_name, HOST_WORDS)    /* name of the rank's host: text, with a zero behind it */                                 \
  FIELD(worlds, 1)                /* number of worlds that the process has been in */                                        \
  FIELD(started_ns, 1)            /* unix time at which the first of them began, in nanoseconds */                           \
  FIELD(cause, 1)                 /* CAUSE_* of the failure; 0: none */                                                      \
  FIELD(culprit, 1)               /* 1 + the rank at fault; 0: none */                                                       \
  LINE(collectives, KINDS *ALGORITHMS) /* entries that moved data (cache line written by the driver's role) */               \
  FIELD(collective_bytes, KINDS *ALGORITHMS) /* bytes of their tensors */                                                    \
  FIELD(collective_tensors, KINDS) /* number of their tensors */                                                             \
  FIELD(collective_ns, KINDS *ALGORITHMS) /* time from the start to the end of these entries */                              \
  FIELD(collective_durations, KINDS *DURATIONS) /* number of entries by that time */                                         \
  FIELD(exposed_ns, 1)            /* part of collective_ns in which some caller was blocked */                               \
  FIELD(fused_bytes, 1)           /* bytes in batches to which the fusion threshold applies */                               \
  FIELD(fusion_capacity, 1)       /* bytes for which these batches had room */                                               \
  FIELD(queue_ns, 1)              /* time from submission to the entry's start, of one tensor of each entry */               \
  FIELD(queued, 1)                /* number of tensors in queue_ns */                                                        \
  FIELD(negotiation_ns, 1)        /* time from the first rank's submission to the batch's closing, of the same tensors */    \
  FIELD(negotiated, 1)            /* number of tensors in negotiation_ns */                                                  \
  FIELD(lag_ns, 1)                /* time from the first rank's submission to this rank's, of the same tensors */            \
  FIELD(lags, 1)                  /* number of tensors in lag_ns */                                                          \
  FIELD(completed, 1)             /* operations that have ended on this rank */                                              \
  FIELD(mismatches, 1)            /* operations that have ended because ranks disagreed */                                   \
  FIELD(last_ns, 1)               /* CLOCK_MONOTONIC at the end of the last entry that moved data */                         \
  FIELD(knob_version, 1)          /* engine_knobs.version of the last entry; the next seven are its knobs */                 \
  FIELD(fusion_threshold, 1)      /* bytes */                                                                                \
  FIELD(cycle_time_ns, 1)                                                                                                    \
  FIELD(stores, 1)                /* STORES_* */                                                                             \
  FIELD(chunk, 1)                 /* bytes */                                                                                \
  FIELD(compression, 1)           /* engine_meta.wire */                                                                     \
  FIELD(sockets_per_lane, 1)                                                                                                 \
  FIELD(between_hosts, 1)         /* BETWEEN_* */                                                                            \
  FIELD(compression_saved_bytes, 1) /* bytes of tensors that were compressed, less those that travelled */                   \
  FIELD(compression_not_finite, 1) /* blocks of results that this rank coded as NaN */                                       \
  FIELD(entries_logged, 1)        /* entries ever written to entry_log, which has none of tensors on a GPU */                \
  FIELD(entry_log, ENTRY_LOG *ENTRY_WORDS) /* the last of them: a ring, in which entry n has row n modulo ENTRY_LOG */       \
  LINE(submitted, 1)              /* operations (cache line written by callers, under the engine's lock) */                  \
  FIELD(requests, 1)              /* submissions as full requests: of new names and changed tensors */                       \
  FIELD(blocked_ns, 1)            /* time in which some caller was blocked, added up over engines */                         \
  FIELD(steps, 1)                 /* optimizer steps that have ended */                                                      \
  FIELD(step_ns, 1)               /* time from the end of one step to the end of the next */                                 \
  FIELD(step_durations, DURATIONS) /* number of steps by that time */                                                        \
  FIELD(steps_logged, 1)          /* steps ever written to step_log */                                                       \
  FIELD(step_log, STEP_LOG *STEP_WORDS) /* the last of them: a ring, as entry_log */                                         \
  LINE(late_steps, LATE_CAUSES)   /* late steps, by cause (cache line written by the thread that marks steps) */             \
  FIELD(late_ns, LATE_CAUSES)     /* by how much they lasted longer than the median */                                       \
  FIELD(late_blind, 1)            /* 1: it is not known how long that thread waits for a processor */                        \
  LINE(cycles, CLOSED_REASONS)    /* batches by the reason for which they closed (cache line written by the coordinator) */  \
  LINE(stall_warnings, 1)         /* stall reports raised (cache line written by the monitor thread and drivers) */          \
  FIELD(stalled, 1)               /* operations in flight that are overdue now */                                            \
  LINE(network_sent, 1)           /* bytes to other hosts (cache line written by the driver's role) */                       \
  FIELD(network_received, 1)      /* bytes from other hosts */                                                               \
  FIELD(crossing_ns, MAX_RANKS)   /* by number of a host: time in which entries waited for data from it */                   \
  LINE(gpu, 1)                    /* 1 + number of the rank's GPU; 0: none (cache line of driver's roles, under a lock) */   \
  FIELD(device_entries, 1)        /* entries of tensors on a GPU that were handed over to be enqueued */                     \
  FIELD(device_bytes, 1)          /* bytes of their tensors */                                                               \
  LINE(device_enqueued, 1)        /* of these entries, those whose work is on the GPU's stream (the CUDA thread's line) */   \
  FIELD(device_passed, 1)         /* of these, those that the GPU is known to have done */                                   \
  FIELD(device_ns, STAGES)        /* durations of samples, by the GPU's clock */                                             \
  FIELD(device_samples, STAGES)   /* number of samples in device_ns */                                                       \
  FIELD(device_sampled_bytes, 1)  /* bytes of the entries whose time in NCCL is in device_ns */                              \
  LINE(group_names, GROUPS *GROUP_WORDS) /* by place of a group: its name, as host_name; empty: free (cache line: Python) */ \
  FIELD(group_ranks, GROUPS)      /* number of its ranks */                                                                  \
  LINE(group_collectives, GROUPS) /* entries of the group that moved data (cache lines of the driver's roles) */             \
  FIELD(group_bytes, GROUPS)      /* bytes of their tensors */                                                               \
  FIELD(group_ns, GROUPS)         /* time from the start to the end of those, without entries on a GPU */                    \
  FIELD(group_completed, GROUPS)  /* operations of the group that have ended on this rank */                                 \
  LINE(group_submitted, GROUPS)   /* operations of the group (cache lines written by callers) */                             \
  LINE(copied_ns, 1)              /* in a launcher's copy: its CLOCK_MONOTONIC as it was made, to which last_ns is */        \
                                  /* translated; 0: this is no copy (cache line written by the launcher) */                   \
  FIELD(copied_state, 1)          /* in a copy: letter of the process's state, as in /proc/PID/stat; 0: not known */         \
  LINE(tuner_phase, 1)            /* PHASE_*; 0: nobody tunes (cache line written by rank 0's tuner) */                      \
  FIELD(tuner_searches, 1)        /* searches begun */                                                                       \
  FIELD(tuner_trials, 1)          /* trials ended */                                                                         \
  FIELD(tuner_changes, 1)         /* settings put into force */                                                              \
  FIELD(tuner_changed_ns, 1)      /* unix time of the last change; 0: none */                                                \
  FIELD(tuner_score_ps, 1)        /* score of the last trial: picoseconds per step or byte; 0: none yet */                   \
  FIELD(tuner_default_ps, 1)      /* score of the setting with which the search began */                                     \
  FIELD(tuner_best_ps, 1)         /* score of the best setting so far */

typedef struct counters_page {
  uint64_t magic, version, bytes, table_bytes;
  _Alignas(COUNTERS_TABLE) char table[COUNTERS_FIELDS - COUNTERS_TABLE];
#define LINE(name, words) _Alignas(64) uint64_t name[words];
#define FIELD(name, words) uint64_t name[words];
  COUNTERS_LAYOUT(LINE, FIELD)
#undef LINE
#undef FIELD
} counters_page;
_Static_assert(offsetof(counters_page, state) == COUNTERS_FIELDS && sizeof(counters_page) <= COUNTERS_BYTES, "a page has room");

#define TABLE_LINE(name, words) +(int)(sizeof #name + 11) /* two blanks, and numbers of five and four digits at most */
_Static_assert(0 COUNTERS_LAYOUT(TABLE_LINE, TABLE_LINE) + sizeof NAMES_TEXT <= COUNTERS_FIELDS - COUNTERS_TABLE, "its table has room");
#undef TABLE_LINE

/* Write the header and the table of a new page, the magic last: a reader that sees it sees the rest. Return whether the page is,
 * or was already, one of this build's. */
static inline int counters_format(counters_page *page) {
  size_t at = 0;
  if (page->magic != 0)
    return page->magic == COUNTERS_MAGIC && page->version == COUNTERS_VERSION && page->bytes == COUNTERS_BYTES;
#define FIELD(name, words)                                                                                              \
  at += (size_t)snprintf(page->table + at, sizeof page->table - at, "%s %zu %d\n", #name, offsetof(counters_page, name), \
                         (int)(words));
  COUNTERS_LAYOUT(FIELD, FIELD)
#undef FIELD
  at += (size_t)snprintf(page->table + at, sizeof page->table - at, "%s", NAMES_TEXT);
  page->version = COUNTERS_VERSION;
  page->bytes = COUNTERS_BYTES;
  page->table_bytes = at;
  __atomic_store_n(&page->magic, COUNTERS_MAGIC, __ATOMIC_RELEASE);
  return 1;
}

/* Return a field of one word, or NULL. */
static inline uint64_t *counters_field(counters_page *page, const char *name) {
#define FIELD(field, words) \
  if ((words) == 1 && strcmp(name, #field) == 0) return page->field;
  COUNTERS_LAYOUT(FIELD, FIELD)
#undef FIELD
  return NULL;
}

/* Return a field of several words, with their number in `count`, or NULL. */
static inline uint64_t *counters_words(counters_page *page, const char *name, uint64_t *count) {
#define FIELD(field, words) \
  if ((words) > 1 && strcmp(name, #field) == 0) return *count = (uint64_t)(words), page->field;
  COUNTERS_LAYOUT(FIELD, FIELD)
#undef FIELD
  return NULL;
}

/* Add to a word of the page; any thread may call it. */
static inline void tally(uint64_t *word, uint64_t n) { __atomic_fetch_add(word, n, __ATOMIC_RELAXED); }
/* Return the bucket of a duration: see DURATIONS. */
static inline int duration_bucket(uint64_t ns) {
  int k = ns ? 64 - __builtin_clzll(ns) : 0;
  return k < DURATIONS ? k : DURATIONS - 1;
}
#endif
