/* What frozen passes have, when graphs may outlive the lane.
 *
 * NCCL ends a communicator when no graph has it any more, and so long a call that ends it does not return, be it an abort. And of
 * launches of graphs the driver alone knows, so all that the device does has to be waited for. Both may last for ever: threads of their
 * own make these calls, for which the lane waits as long as it likes, and which are left alone then. They and the lane hold a keeper.
 * Whoever lets go of it last frees what was left to it: then no graph can read it any more.
 */
#include "calls.h"

#include <stdlib.h>

enum { REST_UNKNOWN, REST_ASKED, REST_THERE };

struct keeper {
  lane_functions f;
  CUdevice device;
  CUcontext context;
  ncclComm_t comm;       /* that of frozen passes, once it is to be ended */
  int finishes;          /* it is finalized before, which waits for the other ranks */
  uint32_t holders;      /* the lane, and threads; atomic, as the next two */
  uint32_t rest;         /* REST_* */
  uint32_t ended;        /* nothing of the communicator is left */
  int owns;              /* the next two are left to it, and that the context is retained */
  CUmodule module;
  frozen_memory *memory;
};

int lane_hire_keeper(lane *l) {
  keeper *k = l->keeper;
  if (k != NULL) return 0;
  k = calloc(1, sizeof *k);
  if (k == NULL) return -1;
  k->f = l->f;
  k->device = l->device;
  k->context = l->context;
  k->holders = 1;
  l->keeper = k;
  return 0;
}

/* ---- threads of a keeper ---- */

/* Wait until the device does nothing. After an error it does nothing; but while somebody captures, it does not tell. */
static void synchronize(keeper *k) {
  while (k->f.cuCtxSynchronize() == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED) lane_nap();
}

static void release(keeper *k) {
  if (!k->owns) return;
  synchronize(k); /* a launch may have begun before its graph went */
  lane_release_memory(&k->f, k->memory);
  if (k->module != NULL) k->f.cuModuleUnload(k->module);
  k->f.cuDevicePrimaryCtxRelease_v2(k->device);
}

static void let_go(keeper *k) {
  if (add32(&k->holders, (uint32_t)-1) != 1) return; /* pairs with the same of the others: what they have left is there */
  release(k);
  free(k);
}

/* A thread with the context, whose calls spoil no capture. */
static void enter(keeper *k) {
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
  k->f.cuThreadExchangeStreamCaptureMode(&mode);
  k->f.cuCtxSetCurrent(k->context);
}

static void *await_device(void *argument) {
  keeper *k = argument;
  enter(k);
  synchronize(k);
  store32_release(&k->rest, REST_THERE); /* pairs with lane_graphs_rest */
  let_go(k);
  return NULL;
}

static void *end_communicator(void *argument) {
  keeper *k = argument;
  enter(k);
  if (k->finishes) k->f.ncclCommFinalize(k->comm);
  k->f.ncclCommAbort(k->comm);
  store32_release(&k->ended, 1); /* pairs with lane_graphs_have_ended */
  let_go(k);
  return NULL;
}

/* Without a thread, what it would do is never done: who waits for that does so in vain, and frees nothing. */
static void begin(keeper *k, void *(*run)(void *)) {
  add32(&k->holders, 1);
  engine_thread_start(NULL, run, k);
}

/* ---- for the lane ---- */

int lane_graphs_rest(lane *l) {
  keeper *k = l->keeper;
  if (cas32(&k->rest, REST_UNKNOWN, REST_ASKED)) begin(k, await_device);
  return load32_acquire(&k->rest) == REST_THERE; /* pairs with await_device */
}

int lane_graphs_are_over(lane *l, uint64_t limit) {
  uint64_t begun = now_ns();
  if (!lane_has_captured(l)) return 1;
  cas32(&l->keeper->rest, REST_THERE, REST_UNKNOWN); /* that was a while ago */
  while (!lane_graphs_rest(l)) {
    if (now_ns() - begun > limit) return 0;
    lane_nap();
  }
  return CUDA(cuCtxSynchronize) == 0; /* at once, by now; and what the other thread has waited for this one has, too */
}

void lane_end_graphs(lane *l, int finishes) {
  keeper *k = l->keeper;
  if (l->graphs.comm == NULL) return;
  k->comm = l->graphs.comm;
  k->finishes = finishes;
  l->graphs.comm = NULL;
  l->graphs.connected = 0;
  lane_strike(l, &l->graphs);
  begin(k, end_communicator);
}

int lane_graphs_have_ended(lane *l, uint64_t limit) {
  uint64_t begun = now_ns();
  if (l->keeper == NULL || l->keeper->comm == NULL) return 1;
  while (!load32_acquire(&l->keeper->ended)) { /* pairs with end_communicator */
    if (now_ns() - begun > limit) return 0;
    lane_nap();
  }
  return 1;
}

int lane_release_passes(lane *l, uint64_t limit) {
  keeper *k = l->keeper;
  frozen_memory *memory = NULL, *next;
  if (k == NULL) return 0;
  k->owns = !lane_graphs_have_ended(l, 1) || !lane_graphs_are_over(l, limit);
  for (frozen_pass *p = l->passes; p != NULL; p = p->next) {
    if ((next = p->memory) == NULL) continue;
    next->next = memory;
    memory = next;
    p->memory = NULL;
  }
  k->memory = memory;
  k->module = l->module;
  if (!k->owns) lane_release_memory(&l->f, memory);
  store_pointer((void **)&l->passes, NULL);
  l->keeper = NULL;
  int owns = k->owns;
  if (owns) begin(k, await_device); /* else this thread might have to wait for the launches */
  let_go(k);
  return owns;
}
