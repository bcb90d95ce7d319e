/* What the sources of the stand-in share. Everything here is under one lock. */
#ifndef STAND_INTERNAL_H
#define STAND_INTERNAL_H

#include "stand.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- mutants: ways in which a stand-in could be wrong; a litmus program sees each ---- */

/* clang-format off */
#define MUTANTS(X)                                                                                               \
  X(none) X(event_covers_too_much) X(wait_covers_too_much) X(wait_does_nothing) X(rerecord_moves_waits)          \
  X(rerecord_is_ignored) X(unrecorded_wait_blocks) X(unrecorded_query_not_ready) X(query_always_ready)           \
  X(synchronize_does_nothing) X(stream_out_of_order) X(stream0_no_barrier) X(stream0_stops_all)                  \
  X(stream0_crosses_contexts) X(destroyed_stream_drops_work) X(destroyed_event_drops_wait)                       \
  X(arguments_read_late) X(copy_reads_early) X(pageable_copy_reads_late) X(host_access_allowed) X(no_guard)      \
  X(no_poison) X(capture_executes) X(capture_forgets_order) X(unsafe_calls_allowed) X(relaxed_is_refused)        \
  X(thread_local_is_global) X(unjoined_allowed) X(events_need_no_context) X(contexts_are_shared)                 \
  X(elapsed_of_pending) X(priority_not_clamped) X(clock_without_waits) X(clock_without_queries)                  \
  X(clock_without_launches) X(clock_without_streams) X(clock_knows_all)
/* clang-format on */
enum mutant {
#define X(name) MUTANT_##name,
  MUTANTS(X)
#undef X
};
extern enum mutant stand_mutant;
#define MUTANT(name) (stand_mutant == MUTANT_##name)

/* ---- clocks ---- */

enum { AGENTS = 256 }; /* streams and host threads, over the life of the process */

typedef struct moment { /* what happened before something, by agent */
  int references;
  uint64_t at[AGENTS];
} moment;

typedef struct agent {
  int number;
  uint64_t epoch;
  moment *now;
} agent;

moment *moment_new(void);
void moment_join(moment *into, const moment *from);
moment *moment_keep(moment *m);
void moment_drop(moment *m);
agent *agent_new(int host);
void agent_done(agent *a); /* its number may be used again when there is no other */
agent *agent_of_thread(void);

/* ---- memory ---- */

typedef struct footprint { /* who accessed a part of an allocation */
  struct footprint *next;
  uintptr_t lo, hi;
  int write, agent;
  uint64_t epoch;
  moment *when;
  char what[80];
} footprint;

typedef struct allocation {
  struct allocation *next;
  uintptr_t at;
  size_t size, mapped;
  uintptr_t first; /* of its pages */
  struct context *context;
  int pinned, freed;
  footprint *footprints;
} allocation;

allocation *memory_find(uintptr_t at);
void memory_check(const stand_access *access, int agent, uint64_t epoch, moment *when, const char *what);
int memory_holds(uintptr_t at, size_t size, const char *what); /* 0, and reported, if it lies not in live memory */

/* ---- contexts, streams, operations, events ---- */

typedef struct context {
  int device, physical, retained;
  struct stream *legacy;
} context;

enum { QUEUED, RUNNING, DONE };

typedef struct operation {
  int references, state, demanded, wanted_told;
  uint64_t number;
  uint64_t born, not_before, done_at; /* ns */
  struct stream *stream;
  struct operation *next, **needs;
  int n_needs;
  int agent;
  uint64_t epoch;
  moment *when;
  char what[96];
  stand_operation own;
  int is_wait; /* for an event */
} operation;

typedef struct stream {
  struct stream *next;
  context *context;
  int flags, priority, destroyed;
  char name[16];
  agent *agent;
  operation *head, *tail; /* not done */
  operation *last;        /* the last that was enqueued */
  moment *past;           /* of streams that are no more */
  struct capture *capture;
  int *knows; /* in a capture: how many of each stream's nodes come before the next, by agent */
} stream;

typedef struct event {
  struct event *next;
  context *context;
  int flags;
  operation *at; /* what the last record put into its stream; NULL: never recorded */
  struct capture *capture;
  int *knows;
  stream *where;
} event;

extern stream *streams;
extern operation *running; /* what the executor is at */
stream *stream_of(CUstream handle, CUresult *wrong);
event *event_of(CUevent handle);
stream *stream_make(context *c, int flags, int priority);
void stream_gone(stream *s);
int barrier(const stream *s, const stream *other);
CUresult stream_await(stream *s); /* what a host does that waits for all of it */
operation *operation_keep(operation *o);
void operation_drop(operation *o);
/* Puts an operation at the end of a stream, or of its capture; `need` may be NULL. The operation is the stream's, or is
 * returned through `made` with a reference of its own. */
CUresult stream_put(stream *s, const stand_operation *what, operation *need, operation **made);
CUresult operation_await(operation *o); /* deadline and demand; the thread knows afterwards what the operation knew */
void thread_learns(const operation *o);
int streams_busy(void);

/* ---- captures ---- */

typedef struct capture {
  struct capture *next;
  stream *origin;
  pthread_t thread;
  unsigned mode;
  int invalid, n_nodes;
  stand_operation *nodes; /* in the order of the calls */
  int counts[AGENTS];     /* nodes of each stream, by agent */
} capture;

/* Refuses what a thread may not call while something captures. */
CUresult capture_forbids(void);
CUresult capture_put(stream *s, const stand_operation *what);
void capture_invalidate(capture *c);
int legacy_is_captured(const context *c); /* whether a blocking stream of it captures */
CUresult capture_record(event *e, stream *s);
CUresult capture_wait(stream *s, event *e);
void events_forget(const capture *c);

/* ---- contexts ---- */

context *context_current(void);
context *context_of(CUcontext handle);

/* ---- the executor ---- */

extern pthread_cond_t changed;
void executor_start(void);
void thread_start(void *(*body)(void *)); /* detached, and no signal is handled there */
void operation_demand(operation *o);
void lock_wait(double milliseconds); /* gives the lock back for so long, or until something changed */
uint64_t now(void);

/* ---- kernels and control ---- */

enum { FREE_CALL = 0, NEEDS_CONTEXT = 1, UNSAFE = 2, BEFORE_INIT = 4, LOADS = 8 };
/* Each call of the API: takes the lock unless it is refused. */
CUresult stand_enter(const char *call, int kind);
CUresult stand_leave(CUresult code);
#define ENTER(kind)                                 \
  do {                                              \
    CUresult refused = stand_enter(__func__, kind); \
    if (refused) return refused;                    \
  } while (0)
#define LEAVE(code) return stand_leave(code)

extern int stand_initialised;
extern char stand_policy_now;

#endif
