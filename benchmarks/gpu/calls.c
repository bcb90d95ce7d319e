/* What calls of the driver cost in the calling thread, and a wake of another thread: measured one by one, in C, as most take
 * about a microsecond. A library for costs.py, which loads it by ctypes.
 */
#include "engine_ext/gpu/cuda.h"

#include "engine_ext/platform/atomics.h"
#include "engine_ext/platform/doors.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

typedef struct driver {
#define X(name, parameters) CUresult(*name) parameters;
  CUDA_FUNCTIONS(X)
#undef X
} driver;
static driver cu;

enum { MOST = 100 }; /* calls of a batch: fewer than any queue of a device holds */

/* What is called, and on what. */
static CUcontext context;
static CUstream stream, other;
static CUevent passed, pending, events[MOST];
static CUfunction kernel;
static CUresult first; /* that did not succeed */
static const char *failed;

static void check(const char *call, CUresult code) {
  if (code == CUDA_SUCCESS || failed != NULL) return;
  first = code;
  failed = call;
}
#define TRY(name, ...) check(#name, cu.name(__VA_ARGS__))

/* ---- a stream that stands still: what is behind a closed gate is pending ---- */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t moved = PTHREAD_COND_INITIALIZER;
static int is_open;

static void stand_at(void *unused) {
  (void)unused;
  pthread_mutex_lock(&lock);
  while (!is_open) pthread_cond_wait(&moved, &lock);
  pthread_mutex_unlock(&lock);
}

static void move_gate(int open) {
  pthread_mutex_lock(&lock);
  is_open = open;
  pthread_cond_broadcast(&moved);
  pthread_mutex_unlock(&lock);
}

/* ---- what is measured: the k-th call of a batch ---- */

static void nothing(int k) { (void)k; }
static void record(int k) { TRY(cuEventRecord, events[k], stream); }
static void wait_passed(int k) { (void)k, TRY(cuStreamWaitEvent, other, passed, 0); }
static void wait_pending(int k) { (void)k, TRY(cuStreamWaitEvent, other, pending, 0); }
static void query_passed(int k) { (void)k, TRY(cuEventQuery, passed); }
static void query_pending(int k) {
  (void)k;
  CUresult code = cu.cuEventQuery(pending);
  if (code != CUDA_ERROR_NOT_READY) check("cuEventQuery of a pending event", code != CUDA_SUCCESS ? code : CUDA_ERROR_UNKNOWN);
}
static void query_stream(int k) { (void)k, TRY(cuStreamQuery, stream); }
static void is_capturing(int k) {
  CUstreamCaptureStatus status;
  (void)k, TRY(cuStreamIsCapturing, stream, &status);
}
static void current(int k) {
  CUcontext theirs;
  (void)k, TRY(cuCtxGetCurrent, &theirs);
}
static void push_pop(int k) {
  CUcontext ours;
  (void)k, TRY(cuCtxPushCurrent_v2, context), TRY(cuCtxPopCurrent_v2, &ours);
}
static void exchange(int k) {
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
  (void)k, TRY(cuThreadExchangeStreamCaptureMode, &mode), TRY(cuThreadExchangeStreamCaptureMode, &mode);
}
/* All that a submission does (engine_ext/gpu/streams.c), where the context is the device's already. */
static void mark(int k) {
  CUcontext theirs;
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
  TRY(cuCtxGetCurrent, &theirs);
  TRY(cuThreadExchangeStreamCaptureMode, &mode);
  is_capturing(k);
  record(k);
  TRY(cuThreadExchangeStreamCaptureMode, &mode);
}
static void launch(int k) {
  unsigned long long zero = 0;
  void *parameters[] = {&zero, &zero, &zero, &zero, &zero};
  (void)k, TRY(cuLaunchKernel, kernel, 1, 1, 1, 32, 1, 1, 0, stream, parameters, NULL);
}

typedef struct measured {
  const char *name;
  void (*call)(int k);
  int behind_gate; /* the stream, or the event's, stands still meanwhile */
} measured;

static const measured all[] = {
    {"an empty call, to be subtracted", nothing, 0},
    {"cuEventRecord, stream idle", record, 0},
    {"cuEventRecord, stream busy", record, 1},
    {"cuStreamWaitEvent, event passed", wait_passed, 0},
    {"cuStreamWaitEvent, event pending", wait_pending, 1},
    {"cuEventQuery, event passed", query_passed, 0},
    {"cuEventQuery, event pending", query_pending, 1},
    {"cuStreamQuery, stream idle", query_stream, 0},
    {"cuStreamIsCapturing", is_capturing, 0},
    {"cuCtxGetCurrent", current, 0},
    {"cuCtxPushCurrent and cuCtxPopCurrent", push_pop, 0},
    {"cuThreadExchangeStreamCaptureMode, twice", exchange, 0},
    {"a mark, as a submission makes it", mark, 0},
    {"cuLaunchKernel, without work", launch, 0},
};
enum { MEASURED = sizeof all / sizeof *all };

EXPORT int calls_count(void) { return MEASURED; }
EXPORT const char *calls_name(int which) { return all[which].name; }

static int told(char *why, size_t size) {
  const char *name = "?";
  if (failed == NULL) return 0;
  cu.cuGetErrorName(first, &name);
  snprintf(why, size, "%s returned %s", failed, name);
  return -1;
}

/* Find the functions in a library, and make what is called; the device's context is current. 0, or -1 and why. */
EXPORT int calls_open(void *library, CUfunction empty, char *why, size_t size) {
#define X(name, parameters)                                                    \
  if (!(cu.name = (CUresult(*) parameters)(uintptr_t)dlsym(library, #name))) { \
    snprintf(why, size, "the driver has no %s", #name);                        \
    return -1;                                                                 \
  }
  CUDA_FUNCTIONS(X)
#undef X
  kernel = empty;
  TRY(cuCtxGetCurrent, &context);
  TRY(cuStreamCreateWithPriority, &stream, CU_STREAM_NON_BLOCKING, 0);
  TRY(cuStreamCreateWithPriority, &other, CU_STREAM_NON_BLOCKING, 0);
  TRY(cuEventCreate, &passed, CU_EVENT_DISABLE_TIMING);
  TRY(cuEventCreate, &pending, CU_EVENT_DISABLE_TIMING);
  for (int k = 0; k < MOST; k++) TRY(cuEventCreate, &events[k], CU_EVENT_DISABLE_TIMING);
  TRY(cuEventRecord, passed, stream);
  TRY(cuStreamSynchronize, stream);
  return told(why, size);
}

/* Seconds of one call: each sample is the mean of `batch` calls. 0, or -1 and why. */
EXPORT int calls_measure(int which, int batch, double *seconds, int samples, char *why, size_t size) {
  const measured *m = &all[which];
  if (batch > MOST) batch = MOST;
  for (int s = 0; s < samples && failed == NULL; s++) {
    if (m->behind_gate) {
      move_gate(0);
      TRY(cuLaunchHostFunc, stream, stand_at, NULL);
      TRY(cuEventRecord, pending, stream);
    }
    uint64_t begun = now_ns();
    for (int k = 0; k < batch; k++) m->call(k);
    seconds[s] = (double)(now_ns() - begun) / 1e9 / batch;
    move_gate(1);
    TRY(cuStreamSynchronize, stream);
    TRY(cuStreamSynchronize, other);
  }
  return told(why, size);
}

/* ---- a framework's own word for its stream ---- */

typedef int current_stream(int device_type, int32_t device, void **stream);

/* Seconds of one call of `current_work_stream` of a DLPack exchange table. */
EXPORT double calls_current_stream(current_stream *tell, int32_t device, int calls) {
  void *told_stream;
  uint64_t begun = now_ns();
  for (int k = 0; k < calls; k++)
    if (tell(2, device, &told_stream) != 0) return -1;
  return (double)(now_ns() - begun) / 1e9 / calls;
}

/* ---- a thread that sleeps, as the CUDA thread does, and is woken ---- */

static uint32_t door, asked, answered;
static uint64_t awake;

static void *sleeper(void *unused) {
  (void)unused;
  for (;;) {
    uint32_t count = door_count(&door), question = load32_acquire(&asked); /* pairs with calls_wake */
    if (question == UINT32_MAX) return NULL;
    if (question != answered) {
      awake = now_ns();
      store32_release(&answered, question); /* pairs with calls_wake */
    } else {
      door_sleep(&door, count, 0);
    }
  }
}

/* Seconds from a ring until the woken thread runs, and of the ring itself for the one who rings. 0 or an errno. */
EXPORT int calls_wake(double *woken, double *rung, int samples) {
  struct timespec nap = {0, 300000}; /* until it sleeps */
  pthread_t thread;
  asked = answered = 0;
  int status = pthread_create(&thread, NULL, sleeper, NULL);
  if (status != 0) return status;
  for (int s = 0; s < samples; s++) {
    nanosleep(&nap, NULL);
    uint64_t begun = now_ns();
    store32_release(&asked, (uint32_t)s + 1); /* pairs with sleeper */
    door_ring(&door, 1);
    uint64_t over = now_ns();
    while (load32_acquire(&answered) != (uint32_t)s + 1) sched_yield(); /* pairs with sleeper */
    woken[s] = (double)(awake - begun) / 1e9;
    rung[s] = (double)(over - begun) / 1e9;
  }
  store32_release(&asked, UINT32_MAX);
  door_ring(&door, 1);
  pthread_join(thread, NULL);
  return 0;
}

/* ---- calls of NCCL ---- */

typedef struct nccl_calls {
  unsigned (*all_reduce)(const void *, void *, size_t, unsigned, unsigned, void *, CUstream);
  unsigned (*group_start)(void);
  unsigned (*group_end)(void);
  unsigned (*async_error)(void *, unsigned *);
  void *communicator;
  const void *from;
  void *to;
  size_t count; /* float32 numbers */
  CUstream stream;
  int grouped;  /* two in a group */
  int polled;   /* until nothing is in progress */
  long nap_ns;  /* between two looks; 0: none */
} nccl_calls;

enum { IN_PROGRESS = 7, FLOAT32 = 7, TOGETHER = 16 };

static unsigned settle(const nccl_calls *c) {
  struct timespec nap = {0, c->nap_ns};
  unsigned state;
  for (;;) {
    unsigned code = c->async_error(c->communicator, &state);
    if (code != 0 || state != IN_PROGRESS) return code != 0 ? code : state;
    if (c->nap_ns) nanosleep(&nap, NULL);
  }
}

static unsigned once(const nccl_calls *c) {
  unsigned code = 0;
  if (c->grouped) c->group_start();
  for (int k = 0; k <= c->grouped && (code == 0 || code == IN_PROGRESS); k++)
    code = c->all_reduce(c->from, c->to, c->count, FLOAT32, 0, c->communicator, c->stream);
  if (c->grouped) code = c->group_end();
  return code == IN_PROGRESS && c->polled ? 0 : code;
}

/* Seconds until an allreduce has returned, and until it is enqueued. 0, or a code of NCCL's, or -1: the driver failed. */
EXPORT int calls_nccl(const nccl_calls *c, double *returned, double *enqueued, int samples) {
  for (int s = 0; s < samples; s++) {
    uint64_t begun = now_ns();
    unsigned code = once(c);
    uint64_t back = now_ns();
    if (code == 0 && c->polled) code = settle(c);
    if (code != 0) return (int)code;
    returned[s] = (double)(back - begun) / 1e9;
    enqueued[s] = (double)(now_ns() - begun) / 1e9;
    if (s % TOGETHER == TOGETHER - 1) TRY(cuStreamSynchronize, c->stream);
  }
  TRY(cuStreamSynchronize, c->stream);
  return failed != NULL ? -1 : 0;
}
