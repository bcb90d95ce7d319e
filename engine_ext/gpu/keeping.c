/* The keeper: it holds the resources of frozen passes when graphs may outlive the CUDA thread.
 *
 * NCCL ends a communicator only when no graph contains it any more. Until then a call that ends it does not return, even an
 * abort. Only the driver knows of launches of graphs, so the whole device has to become idle. Both may last forever, so threads
 * of their own make these calls. The CUDA thread waits for them as long as it likes, and then abandons them. They and the CUDA
 * thread hold the keeper. The last holder that lets go frees what was left to it, since no graph can read it any more.
 */
#include "calls.h"

#include <stdlib.h>

enum { REST_UNKNOWN, REST_ASKED, REST_THERE };

struct keeper {
  cuda_thread_functions f;
  CUdevice device;
  CUcontext context;
  ncclComm_t comm;       /* communicator of frozen passes, once it is to be ended */
  int finishes;          /* 1: finalize it before, which waits for the other ranks */
  uint32_t holders;      /* number of holders: the CUDA thread and threads; atomic, like the next two fields */
  uint32_t rest;         /* REST_*: whether the device was found idle */
  uint32_t ended;        /* 1: the communicator has been destroyed */
  int owns;              /* 1: the keeper has to free the next two fields and release the context */
  CUmodule module;
  frozen_memory *memory;
};

int cuda_thread_make_keeper(cuda_thread *t) {
  keeper *k = t->keeper;
  if (k != NULL) return 0;
  k = calloc(1, sizeof *k);
  if (k == NULL) return -1;
  k->f = t->f;
  k->device = t->device;
  k->context = t->context;
  k->holders = 1;
  t->keeper = k;
  return 0;
}

/* ---- threads of a keeper ---- */

/* Wait until the device is idle, which it is after an error, too. While a thread captures, the call fails and is repeated. */
static void synchronize(keeper *k) {
  while (k->f.cuCtxSynchronize() == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED) cuda_thread_nap();
}

/* Free what was left to the keeper. */
static void release(keeper *k) {
  if (!k->owns) return;
  synchronize(k); /* a launch may have begun before its graph was destroyed */
  cuda_thread_release_memory(&k->f, k->memory);
  if (k->module != NULL) k->f.cuModuleUnload(k->module);
  k->f.cuDevicePrimaryCtxRelease_v2(k->device);
}

/* Give up a hold; the last one frees the keeper. */
static void drop_hold(keeper *k) {
  if (add32(&k->holders, (uint32_t)-1) != 1) return; /* pairs with the other holders' add32: their writes are visible */
  release(k);
  free(k);
}

/* Prepare a thread of the keeper: set the context, and a capture mode in which its calls spoil no capture. */
static void enter(keeper *k) {
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
  k->f.cuThreadExchangeStreamCaptureMode(&mode);
  k->f.cuCtxSetCurrent(k->context);
}

static void *await_device(void *argument) {
  keeper *k = argument;
  enter(k);
  synchronize(k);
  store32_release(&k->rest, REST_THERE); /* pairs with cuda_thread_graphs_rest */
  drop_hold(k);
  return NULL;
}

static void *end_communicator(void *argument) {
  keeper *k = argument;
  enter(k);
  if (k->finishes) k->f.ncclCommFinalize(k->comm);
  k->f.ncclCommAbort(k->comm);
  store32_release(&k->ended, 1); /* pairs with cuda_thread_graphs_have_ended */
  drop_hold(k);
  return NULL;
}

/* Start a thread that holds the keeper. If that fails, its work is never done, so the CUDA thread waits in vain and frees
 * nothing. */
static void begin(keeper *k, void *(*run)(void *)) {
  add32(&k->holders, 1);
  engine_thread_start(NULL, run, k);
}

/* ---- for the CUDA thread ---- */

int cuda_thread_graphs_rest(cuda_thread *t) {
  keeper *k = t->keeper;
  if (cas32(&k->rest, REST_UNKNOWN, REST_ASKED)) begin(k, await_device);
  return load32_acquire(&k->rest) == REST_THERE; /* pairs with await_device */
}

int cuda_thread_graphs_are_over(cuda_thread *t, uint64_t limit) {
  uint64_t begun = now_ns();
  if (!cuda_thread_has_captured(t)) return 1;
  cas32(&t->keeper->rest, REST_THERE, REST_UNKNOWN); /* ask anew: the device may have worked since */
  while (!cuda_thread_graphs_rest(t)) {
    if (now_ns() - begun > limit) return 0;
    cuda_thread_nap();
  }
  return CUDA(cuCtxSynchronize) == 0; /* returns at once, since the other thread has waited; this one has then, too */
}

void cuda_thread_end_graphs(cuda_thread *t, int finishes) {
  keeper *k = t->keeper;
  if (t->graphs.comm == NULL) return;
  k->comm = t->graphs.comm;
  k->finishes = finishes;
  t->graphs.comm = NULL;
  t->graphs.connected = 0;
  cuda_thread_remove_communicator(t, &t->graphs);
  begin(k, end_communicator);
}

int cuda_thread_graphs_have_ended(cuda_thread *t, uint64_t limit) {
  uint64_t begun = now_ns();
  if (t->keeper == NULL || t->keeper->comm == NULL) return 1;
  while (!load32_acquire(&t->keeper->ended)) { /* pairs with end_communicator */
    if (now_ns() - begun > limit) return 0;
    cuda_thread_nap();
  }
  return 1;
}

int cuda_thread_release_passes(cuda_thread *t, uint64_t limit) {
  keeper *k = t->keeper;
  frozen_memory *memory = NULL, *next;
  if (k == NULL) return 0;
  k->owns = !cuda_thread_graphs_have_ended(t, 1) || !cuda_thread_graphs_are_over(t, limit);
  for (frozen_pass *p = t->passes; p != NULL; p = p->next) {
    if ((next = p->memory) == NULL) continue;
    next->next = memory;
    memory = next;
    p->memory = NULL;
  }
  k->memory = memory;
  k->module = t->module;
  if (!k->owns) cuda_thread_release_memory(&t->f, memory);
  store_pointer((void **)&t->passes, NULL);
  t->keeper = NULL;
  int owns = k->owns;
  if (owns) begin(k, await_device); /* has a thread let go last, since release waits for launches */
  drop_hold(k);
  return owns;
}
