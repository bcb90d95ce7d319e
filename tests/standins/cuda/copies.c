/* Copies, fills, functions of the host, and what stands for the framework's kernels: operations that move or make data.
 */
#include "internal.h"


typedef struct copy {
  CUdeviceptr to, from;
  size_t size;
  void *staged; /* the source, where it had to be read at once */
  unsigned value, width;
} copy;

static void copy_drop(void *data) {
  free(((copy *)data)->staged);
  free(data);
}

static int copy_step(void *data) {
  copy *c = data;
  if (!memory_holds(c->to, c->size, running->what) || !memory_holds(c->from, c->staged ? 0 : c->size, running->what))
    stand_sticky(CUDA_ERROR_ILLEGAL_ADDRESS);
  else memmove(stand_pointer(c->to), c->staged ? c->staged : stand_pointer(c->from), c->size);
  return 1;
}

static int pageable(CUdeviceptr at) {
  return stand_pointer(at) == (void *)(uintptr_t)at && !memory_find((uintptr_t)at);
}

static int inside(CUdeviceptr at, size_t size) {
  allocation *a = memory_find((uintptr_t)at);
  return pageable(at) || (a && at + size <= a->at + a->size);
}

/* Device memory and pinned memory are read when the copy runs. What the host may page out is read in the call. A copy
 * to it "might be synchronous": it is, if the policy is eager. */
static CUresult enqueue_copy(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream handle) {
  stand_access accesses[] = {{(uintptr_t)from, size, 0}, {(uintptr_t)to, size, 1}};
  stand_operation what = {.what = "copy", .step = copy_step, .drop = copy_drop, .accesses = accesses, .n_accesses = 2};
  CUresult wrong;
  operation *made;
  stream *s = stream_of(handle, &wrong);
  copy *c;
  if (!s) return wrong;
  if (!inside(to, size) || !inside(from, size)) return CUDA_ERROR_INVALID_VALUE;
  c = calloc(1, sizeof *c);
  *c = (copy){.to = to, .from = from, .size = size};
  if ((pageable(from) && !MUTANT(pageable_copy_reads_late)) ||
      (MUTANT(copy_reads_early) && stand_pointer(from) == (void *)(uintptr_t)from))
    memcpy(c->staged = malloc(size + 1), (void *)(uintptr_t)from, size);
  what.data = c;
  if (s->capture)
    return pageable(to) || pageable(from) ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : stream_put(s, &what, NULL, NULL);
  wrong = stream_put(s, &what, NULL, &made);
  if (!wrong && pageable(to) && stand_policy_now == 'e') wrong = operation_await(made);
  operation_drop(made);
  return wrong;
}

STAND_API CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream where) {
  ENTER(NEEDS_CONTEXT);
  LEAVE(enqueue_copy(to, from, size, where));
}

STAND_API CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t size, CUstream where) {
  ENTER(NEEDS_CONTEXT);
  LEAVE(enqueue_copy(to, (CUdeviceptr)(uintptr_t)from, size, where));
}

STAND_API CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t size, CUstream where) {
  ENTER(NEEDS_CONTEXT);
  LEAVE(enqueue_copy((CUdeviceptr)(uintptr_t)to, from, size, where));
}

STAND_API CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream where) {
  ENTER(NEEDS_CONTEXT);
  LEAVE(enqueue_copy(to, from, size, where));
}

/* ---- fills ---- */

static int fill_step(void *data) {
  copy *c = data;
  char *at = stand_pointer(c->to);
  if (!memory_holds(c->to, c->size, running->what)) stand_sticky(CUDA_ERROR_ILLEGAL_ADDRESS);
  else
    for (size_t i = 0; i < c->size; i += c->width) memcpy(at + i, &c->value, c->width);
  return 1;
}

static CUresult enqueue_fill(CUdeviceptr to, unsigned value, unsigned width, size_t n, CUstream handle) {
  stand_access access = {(uintptr_t)to, n * width, 1};
  stand_operation what = {.what = "fill", .step = fill_step, .drop = copy_drop, .accesses = &access, .n_accesses = 1};
  CUresult wrong;
  stream *s = stream_of(handle, &wrong);
  if (!s) return wrong;
  if (!inside(to, n * width) || pageable(to) || to % width) return CUDA_ERROR_INVALID_VALUE;
  copy *c = calloc(1, sizeof *c);
  *c = (copy){.to = to, .size = n * width, .value = value, .width = width};
  what.data = c;
  return stream_put(s, &what, NULL, NULL);
}

STAND_API CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t n, CUstream where) {
  ENTER(NEEDS_CONTEXT);
  LEAVE(enqueue_fill(to, value, 1, n, where));
}

STAND_API CUresult cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t n, CUstream where) {
  ENTER(NEEDS_CONTEXT);
  LEAVE(enqueue_fill(to, value, 4, n, where));
}

/* ---- functions of the host: one thread calls them, one after the other ---- */

typedef struct callback {
  CUhostFn function;
  void *argument;
  int state;
} callback;

static callback *calling;

static void *call(void *unused) {
  stand_lock();
  for (;;) {
    callback *c = calling;
    if (!c || c->state != RUNNING) {
      lock_wait(100);
      continue;
    }
    stand_unlock();
    c->function(c->argument);
    stand_lock();
    c->state = DONE;
    calling = NULL;
    stand_poke();
  }
  return unused;
}

static int callback_step(void *data) {
  callback *c = data;
  if (c->state == DONE) {
    c->state = QUEUED; /* a graph calls it again */
    return 1;
  }
  if (c->state == QUEUED && !calling) {
    calling = c;
    c->state = RUNNING;
    stand_poke();
  }
  return 0;
}

STAND_API CUresult cuLaunchHostFunc(CUstream handle, CUhostFn function, void *argument) {
  static int started;
  stand_operation what = {.what = "host function", .step = callback_step, .drop = free};
  CUresult wrong;
  stream *s;
  ENTER(0);
  s = stream_of(handle, &wrong);
  if (!s) LEAVE(wrong);
  if (!started++) thread_start(call);
  callback *c = calloc(1, sizeof *c);
  *c = (callback){function, argument, QUEUED};
  what.data = c;
  LEAVE(stream_put(s, &what, NULL, NULL));
}

/* ---- what the framework computes ---- */

typedef struct compute {
  double delay;
  uint64_t until;
  int n;
  stand_access accesses[];
} compute;

static int compute_step(void *data) {
  compute *c = data;
  int read = 0;
  if (!c->until) c->until = now() + (uint64_t)(c->delay * 1e6);
  if (now() < c->until) return 0;
  c->until = 0;
  for (int i = 0; i < c->n; i++) {
    stand_access *w = &c->accesses[i];
    if (!memory_holds(w->at, w->size, running->what)) return stand_sticky(CUDA_ERROR_ILLEGAL_ADDRESS), 1;
    if (!w->write) continue;
    while (read < c->n && c->accesses[read].write) read++;
    if (read < c->n && c->accesses[read].size >= w->size)
      memmove(stand_pointer(w->at), stand_pointer(c->accesses[read].at), w->size);
    else memset(stand_pointer(w->at), 0xdb, w->size);
    read++;
  }
  return 1;
}

CUresult stand_compute(CUstream where, const stand_access *accesses, int n, double delay, const char *name) {
  size_t size = sizeof *accesses * (size_t)n;
  compute *c = calloc(1, sizeof *c + size);
  stand_operation what = {
      .what = name, .step = compute_step, .drop = free, .data = c, .accesses = accesses, .n_accesses = n};
  c->delay = delay;
  c->n = n;
  memcpy(c->accesses, accesses, size);
  return stand_enqueue(where, &what);
}
