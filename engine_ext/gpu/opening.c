/* The lane's jobs: they open the device's resources, and close them. */
#include "calls.h"

#include <stdlib.h>
#include <string.h>

static const uint64_t DRAIN_NS = 2000000000u; /* longest wait for enqueued work, when everything has to end */

/* ---- the device's identity ---- */

static int identify(lane *l) {
  lane_identity *i = &l->identity;
  CUuuid uuid;
  CUDA_STEP(cuInit, 0);
  CUDA_STEP(cuDriverGetVersion, &i->driver);
  CUDA_STEP(cuDeviceGetCount, &i->devices);
  CUDA_STEP(cuDeviceGet, &l->device, l->d.ordinal);
  CUDA_STEP(cuDeviceGetName, i->name, sizeof i->name, l->device);
  CUDA_STEP(cuDeviceGetUuid_v2, &uuid, l->device);
  memcpy(i->uuid, uuid.bytes, sizeof i->uuid);
  CUDA_STEP(cuDeviceGetPCIBusId, i->pci, sizeof i->pci, l->device);
  return 0;
}

/* ---- context, stream, kernels, memory, events ---- */

/* Load the PTX; a failure's text is the compiler's log, if there is one. */
static int load_module(lane *l) {
  char log[sizeof l->failure.text] = "";
  CUjit_option options[] = {CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES};
  void *values[] = {log, (void *)(uintptr_t)sizeof log};
  STEP(lane_cancelled(l, "cuModuleLoadDataEx"));
  if (CUDA(cuModuleLoadDataEx, &l->module, l->image, 2, options, values) == 0) return 0;
  if (log[0] != 0) memcpy(l->failure.text, log, sizeof log);
  return -1;
}

/* Launch every kernel once. A kernel is loaded at its first launch, which may then have to wait for all running work. All
 * parameters are 0: a plan of no rows, and a reduction of no elements. */
static int launch_kernels(lane *l) {
  uint64_t zero = 0;
  void *parameters[16];
  for (size_t k = 0; k < sizeof parameters / sizeof *parameters; k++) parameters[k] = &zero;
  for (int k = 0; k < l->n_kernels; k++) CUDA_STEP(cuModuleGetFunction, &l->kernels[k], l->module, l->names[k]);
  for (int k = 0; k < l->n_kernels; k++)
    CUDA_STEP(cuLaunchKernel, l->kernels[k], 1, 1, 1, 32, 1, 1, 0, l->stream, parameters, NULL);
  return lane_drain(l, 0);
}

static int prepare(lane *l) {
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
  CUcontext context = NULL;
  int least, greatest;
  CUDA_STEP(cuDevicePrimaryCtxRetain, &context, l->device);
  l->context = context;
  CUDA_STEP(cuCtxSetCurrent, context);
  /* Our calls must not spoil another thread's capture. This call follows cuCtxSetCurrent, as it might make a context. */
  CUDA_STEP(cuThreadExchangeStreamCaptureMode, &mode);
  CUDA_STEP(cuCtxGetStreamPriorityRange, &least, &greatest);
  CUDA_STEP(cuStreamCreateWithPriority, &l->stream, CU_STREAM_NON_BLOCKING, greatest);
  STEP(load_module(l));
  STEP(launch_kernels(l));
  if (lane_table_bytes(2, l->slab_bytes) > l->table_bytes / 4) /* a table of the whole slab must fit a quarter of the ring */
    return lane_failed(l, "prepare", CUDA_ERROR_INVALID_VALUE, "a slab too large for its tables", NULL);
  CUDA_STEP(cuMemAlloc_v2, &l->slab, l->slab_bytes);
  CUDA_STEP(cuMemAlloc_v2, &l->device_tables, l->table_bytes);
  CUDA_STEP(cuMemHostAlloc, (void **)&l->tables, l->table_bytes, 0);
  for (int k = 0; k < DEVICE_OUTSTANDING; k++) {
    CUDA_STEP(cuEventCreate, &l->begun[k], CU_EVENT_DISABLE_TIMING);
    CUDA_STEP(cuEventCreate, &l->done[k], CU_EVENT_DISABLE_TIMING);
  }
  while (l->n_marks < LANE_MARKS) {
    device_mark *mark = NULL;
    STEP(lane_cancelled(l, "cuEventCreate"));
    STEP(lane_make_mark(l, 0, &mark));
    l->d.unmark(&l->d, mark);
  }
  return lane_make_timers(l);
}

/* ---- the communicator ---- */

/* Abort a communicator, if there is one; an abort is local and waits for no rank. */
static void end_communicator(lane *l, communicator *c) {
  if (c->comm != NULL) NCCL(ncclCommAbort, c->comm);
  c->comm = NULL;
  c->connected = 0;
}

/* Abort all communicators, several of them in one group. Freeing the first one's memory waits for all work of the device, so
 * kernels of the others that wait for a rank have to be told to end before. */
static void end_communicators(lane *l) {
  communicator *c;
  int several;
  lane_end_graphs(l, 0);
  c = l->communicators;
  several = c != NULL && c->next != NULL;
  if (several) NCCL(ncclGroupStart);
  for (; c != NULL; c = c->next)
    if (c->connected) end_communicator(l, c);
  for (c = l->communicators; c != NULL; c = c->next) end_communicator(l, c); /* last: half made ones wait for NCCL's thread */
  if (several) NCCL(ncclGroupEnd);
}

/* Return whether the stream becomes empty and frozen passes end, each within DRAIN_NS. */
static int comes_to_rest(lane *l) { return lane_drain(l, DRAIN_NS) != 1 && lane_passes_are_over(l, DRAIN_NS); }

/* Kernels of NCCL may wait for a rank that does not come. A revocation, where NCCL has it, tells them to end and frees nothing.
 * An abort also frees memory, which other ranks may still read, so it comes only if the device stays busy. */
void lane_quieten(lane *l) {
  int busy = 1;
  if (lane_has_captured(l)) lane_end_graphs(l, 0); /* a revocation ends, and a graph may be launched after it */
  if (l->f.ncclCommRevoke != NULL) {
    for (communicator *c = l->communicators; c != NULL; c = c->next)
      if (c->comm != NULL) NCCL(ncclCommRevoke, c->comm, 0);
    busy = !comes_to_rest(l);
  }
  if (busy) {
    end_communicators(l);
    busy = !comes_to_rest(l);
  }
  if (!busy) store_release(&l->d.passed, UINT64_MAX); /* pairs with has_passed: tensors may be freed */
  l->quiet = 1;
}

/* Warm up the communicator. If that fails, kernels may still read other ranks' memory, so the job ends only after them. */
static int warm_up(lane *l) {
  if (lane_warm_up(l) == 0) return 0;
  if (!l->world.connected) lane_quieten(l); /* else the thread's loop does it, after it has reported the failure */
  return -1;
}

int lane_join_ranks(lane *l, int blocking) {
  communicator *c = l->at;
  ncclConfig_t config = {
      .size = sizeof config,
      .magic = NCCL_API_MAGIC,
      .version = NCCL_CONFIG_VERSION,
      .blocking = blocking, /* 0: the only mode in which a communicator can be aborted at any time */
      .cgaClusterSize = NCCL_CONFIG_UNDEF_INT,
      .minCTAs = NCCL_CONFIG_UNDEF_INT,
      .maxCTAs = NCCL_CONFIG_UNDEF_INT,
      .netName = NULL,
      .splitShare = NCCL_CONFIG_UNDEF_INT,
  };
  STEP(l->failure.call != NULL);
  NCCL_STEP(ncclCommInitRankConfig, &c->comm, c->size, c->id, c->rank, &config);
  return lane_settle(l, "ncclCommInitRankConfig");
}

int lane_connect_ranks(lane *l) {
  STEP(lane_join_ranks(l, 0));
  STEP(warm_up(l));
  l->at->connected = 1;
  return 0;
}

static int connect_all(lane *l) {
  l->world.id = l->id;
  lane_enlist(l, &l->world);
  return lane_connect_ranks(l);
}

/* ---- closing; resources may be missing ---- */

/* Destroy all marks in the pools. */
static void release_marks(lane *l) {
  device_mark *lists[2], *mark, *next;
  pthread_mutex_lock(&l->marks_lock);
  lists[0] = l->marks;
  lists[1] = l->timed;
  l->marks = l->timed = NULL;
  pthread_mutex_unlock(&l->marks_lock);
  for (int k = 0; k < 2; k++)
    for (mark = lists[k]; mark != NULL; mark = next) {
      next = mark->next;
      CUDA(cuEventDestroy_v2, mark->event);
      free(mark);
    }
}

/* Let no more program threads in, and wait for those between enter and leave (streams.c), which use the resources. Returns
 * whether all have left within DRAIN_NS: a call of CUDA may never return. */
static int see_visitors_out(lane *l) {
  uint64_t begun = now_ns();
  or32(&l->visitors, LANE_CLOSED); /* pairs with enter */
  while ((load32_acquire(&l->visitors) & ~LANE_CLOSED) != 0) {
    if (now_ns() - begun > DRAIN_NS) return 0;
    lane_nap();
  }
  return 1;
}

/* Free all resources. Those that graphs may need come last; if a graph still exists, the keeper frees them with the context. */
static void release_context(lane *l) {
  int left;
  for (int k = 0; k < DEVICE_OUTSTANDING; k++) {
    if (l->begun[k] != NULL) CUDA(cuEventDestroy_v2, l->begun[k]);
    if (l->done[k] != NULL) CUDA(cuEventDestroy_v2, l->done[k]);
    l->begun[k] = l->done[k] = NULL;
  }
  lane_release_timers(l);
  release_marks(l);
  if (l->tables != NULL) CUDA(cuMemFreeHost, l->tables);
  if (l->device_tables != 0) CUDA(cuMemFree_v2, l->device_tables);
  if (l->slab != 0) CUDA(cuMemFree_v2, l->slab);
  if (l->stream != NULL) CUDA(cuStreamDestroy_v2, l->stream);
  left = lane_release_passes(l, DRAIN_NS); /* 1: the keeper also has the module and the context */
  if (l->module != NULL && !left) CUDA(cuModuleUnload, l->module);
  l->tables = NULL;
  l->device_tables = l->slab = 0;
  l->module = NULL;
  l->stream = NULL;
  CUDA(cuCtxSetCurrent, NULL);
  if (!left) CUDA(cuDevicePrimaryCtxRelease_v2, l->device);
  l->context = NULL;
}

/* Wait until a finalized communicator has sent to other hosts what an abort would drop, at most until DRAIN_NS after `begun`.
 * That is over when all ranks have finalized it. */
static void finish_communicator(lane *l, communicator *c, uint64_t begun) {
  ncclResult_t state = ncclInProgress;
  while (c->connected && state == ncclInProgress && now_ns() - begun < DRAIN_NS) {
    if (NCCL(ncclCommGetAsyncError, c->comm, &state)) return;
    lane_nap();
  }
}

static void finish_communicators(lane *l) {
  uint64_t begun = now_ns();
  for (communicator *c = l->communicators; c != NULL; c = c->next)
    if (c->connected && NCCL(ncclCommFinalize, c->comm)) c->connected = 0;
  for (communicator *c = l->communicators; c != NULL; c = c->next) finish_communicator(l, c, begun);
}

/* The caller guarantees that the devices of all ranks of `at` have passed all of its items, and that all ranks know. */
int lane_part_ranks(lane *l) {
  communicator *c = l->at;
  STEP(l->failure.call != NULL || lane_cancelled(l, "ncclCommFinalize"));
  STEP(lane_drain(l, 0)); /* before the abort, which waits for the device, too, but cannot be given up */
  if (c->connected && NCCL(ncclCommFinalize, c->comm) == 0) finish_communicator(l, c, now_ns());
  end_communicator(l, c);
  lane_remove_communicator(l, c);
  return l->failure.call != NULL ? -1 : 0;
}

/* Do LANE_CLOSE. `left` says afterwards whether something did not end. */
static void close_all(lane *l) {
  int whole = l->world.comm != NULL && l->world.connected && !l->quiet, well = l->failure.call == NULL && !load32_acquire(&l->cancelled);
  if (whole && !well) lane_quieten(l);
  if (l->stream != NULL && lane_drain(l, DRAIN_NS)) well = 0;
  if (whole && well && (!lane_passes_are_over(l, DRAIN_NS) || !lane_graphs_are_over(l, DRAIN_NS))) well = 0;
  if (whole && well) lane_look(l); /* the last samples */
  if (whole && well) lane_end_graphs(l, 1);
  if (whole && well) finish_communicators(l);
  end_communicators(l);
  lane_graphs_have_ended(l, DRAIN_NS);
  l->left = l->stream != NULL && !comes_to_rest(l);
  if (!l->left) store_release(&l->d.passed, UINT64_MAX); /* pairs with has_passed: tensors may be freed */
  if (l->context != NULL && !l->left) l->left = !see_visitors_out(l);
  if (l->context != NULL && !l->left) release_context(l);
}

void lane_work(lane *l, uint32_t job) {
  switch (job) {
    case LANE_IDENTIFY: identify(l); break;
    case LANE_PREPARE: prepare(l); break;
    case LANE_NAME:
      if (!lane_cancelled(l, "ncclGetUniqueId")) NCCL(ncclGetUniqueId, &l->id);
      break;
    case LANE_CONNECT: connect_all(l); break;
    case LANE_CLOSE: close_all(l); break;
  }
}
