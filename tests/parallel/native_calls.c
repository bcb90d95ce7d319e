/* A user of the native call (engine_ext/bindings/calls.h) without a framework: it submits calls from plain threads, and notes
 * all that can be known of each `done`. native_calls.py is its Python side.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "engine_ext/bindings/calls.h"
#include "engine_ext/platform/cpu.h"

enum { MOST_THREADS = 64 };

/* One call and what became of it. Python makes it, and keeps it for as long as a `done` may come. */
typedef struct outcome {
  engine_call call;                     /* what `again` submits */
  void (*then)(struct outcome *);       /* called by `done` when all below is noted; NULL: nothing */
  void *parameter;                      /* of `then` */
  uint32_t left;                        /* how many times `again` still submits the call */
  /* what `done` has noted */
  uint32_t times;                       /* atomic: how many times it was called */
  uint32_t finished;                    /* atomic: how many of them are over */
  int32_t status, ranks;
  uint32_t count, held_gil;             /* held_gil: how often it was called with Python's lock held */
  int32_t thread, submitter;            /* numbers of threads: of the last `done`, of the last submit */
  uint32_t inside;                      /* whether the last `done` came before that submit had returned, on its thread */
  uint32_t signals;                     /* of SIGINT, SIGTERM, SIGUSR1, SIGCHLD: how many were not blocked */
  uint64_t floats;                      /* the floating-point environment of the last `done` */
  uint64_t order;                       /* number of the first `done` among all of this process, from 1 */
  uint64_t begun, returned, ended;      /* monotonic nanoseconds: submit was called; it returned; `done` was called */
  char *memory;                         /* what was gathered: ours to free */
  uint64_t bytes;
  int64_t *rows;                        /* that came from each rank; NULL: none were told */
  char *parts;                          /* tensors of a gathered group, one after the other */
  uint64_t *part_bytes;                 /* of each */
  int64_t *part_rows;                   /* of each, from each rank */
  char *text;
} outcome;

static const engine_calls *calls;
static int (*holds_gil)(void);
static uint64_t orders;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed;
static uint32_t gate;                   /* under `lock`: how many gates have been opened */

static uint64_t now(void) {
  struct timespec at;
  clock_gettime(CLOCK_MONOTONIC, &at);
  return (uint64_t)at.tv_sec * 1000000000u + (uint64_t)at.tv_nsec;
}

static int32_t thread_number(void) { return (int32_t)syscall(SYS_gettid); }

/* Wait on `changed` until the monotonic time `end`; whether it has come. The caller holds the lock. */
static int over(uint64_t end) {
  struct timespec at = {(time_t)(end / 1000000000u), (long)(end % 1000000000u)};
  return pthread_cond_timedwait(&changed, &lock, &at) == ETIMEDOUT;
}

/* Free what the last `done` was given, and what it has noted of it. */
void forget(outcome *noted) {
  free(noted->memory);
  free(noted->rows);
  free(noted->parts);
  free(noted->part_bytes);
  free(noted->part_rows);
  free(noted->text);
  noted->memory = noted->parts = noted->text = NULL;
  noted->part_bytes = NULL;
  noted->rows = noted->part_rows = NULL;
}

static void note_parts(outcome *noted, const engine_result *result) {
  uint64_t total = 0, at = 0;
  noted->part_bytes = calloc(result->count, sizeof *noted->part_bytes);
  noted->part_rows = calloc((size_t)result->count * (size_t)result->ranks, sizeof *noted->part_rows);
  for (uint32_t k = 0; k < result->count; k++) {
    noted->part_bytes[k] = calls->part_rows(result, k, noted->part_rows + (size_t)k * (size_t)result->ranks);
    total += noted->part_bytes[k];
  }
  noted->parts = malloc(total ? total : 1);
  for (uint32_t first = 0; first < 2; first++, at = 0)  /* those of even numbers, and then the others */
    for (uint32_t k = 0; k < result->count; k++) {
      if (k % 2 == first) calls->part_copy(result, k, noted->parts + at);
      at += noted->part_bytes[k];
    }
}

static void done(void *argument, engine_result *result) {
  static const int looked_at[] = {SIGINT, SIGTERM, SIGUSR1, SIGCHLD};
  outcome *noted = argument;
  sigset_t mask;
  noted->ended = now();
  noted->floats = engine_float_save();
  noted->held_gil += holds_gil() != 0;
  noted->thread = thread_number();
  noted->inside = noted->thread == noted->submitter && noted->returned == 0;
  pthread_sigmask(SIG_BLOCK, NULL, &mask);
  noted->signals = 0;
  for (size_t k = 0; k < sizeof looked_at / sizeof *looked_at; k++) noted->signals += !sigismember(&mask, looked_at[k]);
  noted->status = result->status;
  noted->ranks = result->ranks;
  noted->count = result->count;
  forget(noted);
  noted->text = result->text != NULL ? strdup(result->text) : NULL;
  noted->memory = result->memory;
  noted->bytes = result->bytes;
  if (result->rows != NULL) {
    noted->rows = malloc((size_t)result->ranks * sizeof *noted->rows);
    memcpy(noted->rows, result->rows, (size_t)result->ranks * sizeof *noted->rows);
  }
  if (result->status == ENGINE_CALL_OK && result->count && result->memory != NULL) note_parts(noted, result);
  if (__atomic_add_fetch(&noted->times, 1, __ATOMIC_ACQ_REL) == 1)
    noted->order = __atomic_add_fetch(&orders, 1, __ATOMIC_ACQ_REL);
  if (noted->then != NULL) noted->then(noted);
  pthread_mutex_lock(&lock);
  __atomic_add_fetch(&noted->finished, 1, __ATOMIC_RELEASE);
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&lock);
}

/* ---- what `then` may be */

/* Submit the call again, as often as is left. */
void again(outcome *noted);

/* Stay until a gate is opened of which `parameter` is the number. */
void at_gate(outcome *noted) {
  pthread_mutex_lock(&lock);
  while (gate < (uint32_t)(uintptr_t)noted->parameter) over(now() + 1000000000u);
  pthread_mutex_unlock(&lock);
}

/* Submit another call, and stay until it is done. */
void into_another(outcome *noted);

/* Leave denormals flushed on this thread. */
void flushing(outcome *noted);

/* Write to where there is no memory. */
void crash(outcome *noted) { *(volatile char *)noted->parameter = 1; }

/* ---- what Python calls */

uint64_t size_of_call(void) { return sizeof(engine_call); }
uint64_t size_of_outcome(void) { return sizeof(outcome); }

/* In a forked child no thread of the parent holds the lock. */
static void in_child(void) { pthread_mutex_init(&lock, NULL); }

__attribute__((constructor)) static void opened(void) {
  pthread_condattr_t monotonic;
  pthread_condattr_init(&monotonic);
  pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
  pthread_cond_init(&changed, &monotonic);
  pthread_atfork(NULL, NULL, in_child);
}

void open_calls(uintptr_t table, uintptr_t gil_check) {
  calls = (const engine_calls *)table;
  holds_gil = (int (*)(void))gil_check;
}

void open_gate(uint32_t number) {
  pthread_mutex_lock(&lock);
  gate = number;
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&lock);
}

/* Submit on this thread. */
void submit_here(outcome *noted) {
  noted->call.done = done;
  noted->call.argument = noted;
  noted->submitter = thread_number();
  noted->returned = 0;
  noted->begun = now();
  calls->submit(&noted->call);
  noted->returned = now();
}

/* Wait until each `done` has been called `times` times and is over; whether that was within so many nanoseconds. */
int wait_for(outcome **all, uint32_t count, uint32_t times, uint64_t ns) {
  uint64_t end = now() + ns;
  int late = 0;
  pthread_mutex_lock(&lock);
  for (uint32_t k = 0; k < count && !late; k++)
    while (__atomic_load_n(&all[k]->finished, __ATOMIC_ACQUIRE) < times && !late) late = over(end);
  pthread_mutex_unlock(&lock);
  return !late;
}

void again(outcome *noted) {
  if (noted->left == 0) return;
  noted->left--;
  calls->submit(&noted->call);
}

void into_another(outcome *noted) {
  outcome *other = noted->parameter;
  submit_here(other);
  wait_for(&other, 1, 1, 60000000000u);
}

typedef struct share {
  outcome **all;
  uint32_t first, count, step;
  pthread_barrier_t *together;
} share;

static void *submit_share(void *argument) {
  const share *mine = argument;
  pthread_barrier_wait(mine->together);
  for (uint32_t k = mine->first; k < mine->count; k += mine->step) submit_here(mine->all[k]);
  return NULL;
}

/* Submit calls from `threads` plain threads, which begin together: call k from thread k % threads. Returns when all submits have. */
int submit_from(outcome **all, uint32_t count, uint32_t threads) {
  pthread_t running[MOST_THREADS];
  share shares[MOST_THREADS];
  pthread_barrier_t together;
  int status = 0;
  if (threads > MOST_THREADS) return EINVAL;
  pthread_barrier_init(&together, NULL, threads);
  for (uint32_t k = 0; k < threads && !status; k++) {
    shares[k] = (share){all, k, count, threads, &together};
    status = pthread_create(&running[k], NULL, submit_share, &shares[k]);
    if (status) abort();                /* the others wait for it */
  }
  for (uint32_t k = 0; k < threads; k++) pthread_join(running[k], NULL);
  pthread_barrier_destroy(&together);
  return status;
}

typedef struct repetition {
  outcome *noted;
  uint32_t times;
  uint64_t *ns;
  int late;
} repetition;

static void *repeat(void *argument) {
  repetition *mine = argument;
  uint32_t before = mine->noted->finished;
  for (uint32_t k = 0; k < mine->times && !mine->late; k++) {
    submit_here(mine->noted);
    mine->late = !wait_for(&mine->noted, 1, before + k + 1, 60000000000u);
    mine->ns[k] = mine->noted->ended - mine->noted->begun;
  }
  return NULL;
}

/* Submit a call `times` times from a plain thread, each time when it is done; nanoseconds from its submit to its `done`. Whether
 * none took a minute. */
int one_after_the_other(outcome *noted, uint32_t times, uint64_t *ns) {
  repetition mine = {noted, times, ns, 0};
  pthread_t running;
  if (pthread_create(&running, NULL, repeat, &mine)) abort();
  pthread_join(running, NULL);
  return !mine.late;
}

/* Flush denormals to zero on this thread, or no longer. */
void flush_denormals(int on) {
#if defined(__x86_64__)
  _mm_setcsr(on ? _mm_getcsr() | 0x8040u : _mm_getcsr() & ~0x8040u);
#else
  (void)on;
#endif
}

void flushing(outcome *noted) {
  (void)noted;
  flush_denormals(1);
}

uint64_t default_floats(void) { return ENGINE_FLOAT_DEFAULT; }
