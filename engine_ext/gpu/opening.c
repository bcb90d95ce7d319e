/* The CUDA thread's jobs: they open the device's resources, and close them. */
#include "calls.h"

#include <stdlib.h>
#include <string.h>

static const uint64_t DRAIN_NS = 2000000000u; /* longest wait for enqueued work, when everything has to end */

/* ---- the device's identity ---- */

static int identify(cuda_thread *t) {
  cuda_thread_identity *i = &t->identity;
  CUuuid uuid;
  CUDA_STEP(cuInit, 0);
  CUDA_STEP(cuDriverGetVersion, &i->driver);
  CUDA_STEP(cuDeviceGetCount, &i->devices);
  CUDA_STEP(cuDeviceGet, &t->device, t->d.ordinal);
  CUDA_STEP(cuDeviceGetName, i->name, sizeof i->name, t->device);
  CUDA_STEP(cuDeviceGetUuid_v2, &uuid, t->device);
  memcpy(i->uuid, uuid.bytes, sizeof i->uuid);
  CUDA_STEP(cuDeviceGetPCIBusId, i->pci, sizeof i->pci, t->device);
  return 0;
}

/* ---- context, stream, kernels, memory, events ---- */

/* Load the PTX; a failure's text is the compiler's log, if there is one. */
static int load_module(cuda_thread *t) {
  char log[sizeof t->failure.text] = "";
  CUjit_option options[] = {CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES};
  void *values[] = {log, (void *)(uintptr_t)sizeof log};
  STEP(cuda_thread_cancelled(t, "cuModuleLoadDataEx"));
  if (CUDA(cuModuleLoadDataEx, &t->module, t->image, 2, options, values) == 0) return 0;
  if (log[0] != 0) memcpy(t->failure.text, log, sizeof log);
  return -1;
}

/* Launch every kernel once. A kernel is loaded at its first launch, which may then have to wait for all running work. All
 * parameters are 0: a plan of no rows, and a reduction of no elements. */
static int launch_kernels(cuda_thread *t) {
  uint64_t zero = 0;
  void *parameters[16];
  for (size_t k = 0; k < sizeof parameters / sizeof *parameters; k++) parameters[k] = &zero;
  for (int k = 0; k < t->n_kernels; k++) CUDA_STEP(cuModuleGetFunction, &t->kernels[k], t->module, t->names[k]);
  for (int k = 0; k < t->n_kernels; k++)
    CUDA_STEP(cuLaunchKernel, t->kernels[k], 1, 1, 1, 32, 1, 1, 0, t->stream, parameters, NULL);
  return cuda_thread_drain(t, 0);
}

static int prepare(cuda_thread *t) {
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
  CUcontext context = NULL;
  int least, greatest;
  CUDA_STEP(cuDevicePrimaryCtxRetain, &context, t->device);
  t->context = context;
  CUDA_STEP(cuCtxSetCurrent, context);
  /* Our calls must not spoil another thread's capture. This call follows cuCtxSetCurrent, as it might make a context. */
  CUDA_STEP(cuThreadExchangeStreamCaptureMode, &mode);
  CUDA_STEP(cuCtxGetStreamPriorityRange, &least, &greatest);
  CUDA_STEP(cuStreamCreateWithPriority, &t->stream, CU_STREAM_NON_BLOCKING, greatest);
  STEP(load_module(t));
  STEP(launch_kernels(t));
  /* A table of the whole slab must fit a quarter of the ring. */
  if (cuda_thread_table_bytes(2, t->slab_bytes) > t->table_bytes / 4)
    return cuda_thread_failed(t, "prepare", CUDA_ERROR_INVALID_VALUE, "a slab too large for its tables", NULL);
  CUDA_STEP(cuMemAlloc_v2, &t->slab, t->slab_bytes);
  CUDA_STEP(cuMemAlloc_v2, &t->device_tables, t->table_bytes);
  CUDA_STEP(cuMemHostAlloc, (void **)&t->tables, t->table_bytes, 0);
  for (int k = 0; k < DEVICE_OUTSTANDING; k++) {
    CUDA_STEP(cuEventCreate, &t->begun[k], CU_EVENT_DISABLE_TIMING);
    CUDA_STEP(cuEventCreate, &t->done[k], CU_EVENT_DISABLE_TIMING);
  }
  while (t->n_marks < CUDA_THREAD_MARKS) {
    device_mark *mark = NULL;
    STEP(cuda_thread_cancelled(t, "cuEventCreate"));
    STEP(cuda_thread_make_mark(t, 0, &mark));
    t->d.unmark(&t->d, mark);
  }
  return cuda_thread_make_timers(t);
}

/* ---- the communicator ---- */

/* Abort a communicator, if there is one; an abort is local and waits for no rank. */
static void end_communicator(cuda_thread *t, communicator *c) {
  if (c->comm != NULL) NCCL(ncclCommAbort, c->comm);
  c->comm = NULL;
  c->connected = 0;
}

/* Abort all communicators, several of them in one group. Freeing the first one's memory waits for all work of the device, so
 * kernels of the others that wait for a rank have to be told to end before. */
static void end_communicators(cuda_thread *t) {
  communicator *c;
  int several;
  cuda_thread_end_graphs(t, 0);
  c = t->communicators;
  several = c != NULL && c->next != NULL;
  if (several) NCCL(ncclGroupStart);
  for (; c != NULL; c = c->next)
    if (c->connected) end_communicator(t, c);
  for (c = t->communicators; c != NULL; c = c->next) end_communicator(t, c); /* last: half made ones wait for NCCL's thread */
  if (several) NCCL(ncclGroupEnd);
}

/* Return whether the stream becomes empty and frozen passes end, each within DRAIN_NS. */
static int comes_to_rest(cuda_thread *t) {
  return cuda_thread_drain(t, DRAIN_NS) != 1 && cuda_thread_passes_are_over(t, DRAIN_NS);
}

/* Kernels of NCCL may wait for a rank that does not come. A revocation, where NCCL has it, tells them to end and frees nothing.
 * An abort also frees memory, which other ranks may still read, so it comes only if the device stays busy. */
void cuda_thread_quieten(cuda_thread *t) {
  int busy = 1;
  if (cuda_thread_has_captured(t)) cuda_thread_end_graphs(t, 0); /* a revocation ends, and a graph may be launched after it */
  if (t->f.ncclCommRevoke != NULL) {
    for (communicator *c = t->communicators; c != NULL; c = c->next)
      if (c->comm != NULL) NCCL(ncclCommRevoke, c->comm, 0);
    busy = !comes_to_rest(t);
  }
  if (busy) {
    end_communicators(t);
    busy = !comes_to_rest(t);
  }
  if (!busy) store_release(&t->d.passed, UINT64_MAX); /* pairs with has_passed: tensors may be freed */
  t->quiet = 1;
}

/* Warm up the communicator. If that fails, kernels may still read other ranks' memory, so the job ends only after them. */
static int warm_up(cuda_thread *t) {
  if (cuda_thread_warm_up(t) == 0) return 0;
  if (!t->world.connected) cuda_thread_quieten(t); /* else the thread's loop does it, after it has reported the failure */
  return -1;
}

int cuda_thread_join_ranks(cuda_thread *t, int blocking) {
  communicator *c = t->at;
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
  STEP(t->failure.call != NULL);
  NCCL_STEP(ncclCommInitRankConfig, &c->comm, c->size, c->id, c->rank, &config);
  return cuda_thread_settle(t, "ncclCommInitRankConfig");
}

int cuda_thread_connect_ranks(cuda_thread *t) {
  STEP(cuda_thread_join_ranks(t, 0));
  STEP(warm_up(t));
  t->at->connected = 1;
  return 0;
}

static int connect_all(cuda_thread *t) {
  t->world.id = t->id;
  cuda_thread_enlist(t, &t->world);
  return cuda_thread_connect_ranks(t);
}

/* ---- closing; resources may be missing ---- */

/* Destroy all marks in the pools. */
static void release_marks(cuda_thread *t) {
  device_mark *lists[2], *mark, *next;
  pthread_mutex_lock(&t->marks_lock);
  lists[0] = t->marks;
  lists[1] = t->timed;
  t->marks = t->timed = NULL;
  pthread_mutex_unlock(&t->marks_lock);
  for (int k = 0; k < 2; k++)
    for (mark = lists[k]; mark != NULL; mark = next) {
      next = mark->next;
      CUDA(cuEventDestroy_v2, mark->event);
      free(mark);
    }
}

/* Let no more program threads in, and wait for those between enter and leave (streams.c), which use the resources. Returns
 * whether all have left within DRAIN_NS: a call of CUDA may never return. */
static int see_visitors_out(cuda_thread *t) {
  uint64_t begun = now_ns();
  or32(&t->visitors, CUDA_THREAD_CLOSED); /* pairs with enter */
  while ((load32_acquire(&t->visitors) & ~CUDA_THREAD_CLOSED) != 0) {
    if (now_ns() - begun > DRAIN_NS) return 0;
    cuda_thread_nap();
  }
  return 1;
}

/* Free all resources. Those that graphs may need come last; if a graph still exists, the keeper frees them with the context. */
static void release_context(cuda_thread *t) {
  int left;
  for (int k = 0; k < DEVICE_OUTSTANDING; k++) {
    if (t->begun[k] != NULL) CUDA(cuEventDestroy_v2, t->begun[k]);
    if (t->done[k] != NULL) CUDA(cuEventDestroy_v2, t->done[k]);
    t->begun[k] = t->done[k] = NULL;
  }
  cuda_thread_release_timers(t);
  release_marks(t);
  if (t->tables != NULL) CUDA(cuMemFreeHost, t->tables);
  if (t->device_tables != 0) CUDA(cuMemFree_v2, t->device_tables);
  if (t->slab != 0) CUDA(cuMemFree_v2, t->slab);
  if (t->stream != NULL) CUDA(cuStreamDestroy_v2, t->stream);
  left = cuda_thread_release_passes(t, DRAIN_NS); /* 1: the keeper also has the module and the context */
  if (t->module != NULL && !left) CUDA(cuModuleUnload, t->module);
  t->tables = NULL;
  t->device_tables = t->slab = 0;
  t->module = NULL;
  t->stream = NULL;
  CUDA(cuCtxSetCurrent, NULL);
  if (!left) CUDA(cuDevicePrimaryCtxRelease_v2, t->device);
  t->context = NULL;
}

/* Wait until a finalized communicator has sent to other hosts what an abort would drop, at most until DRAIN_NS after `begun`.
 * That is over when all ranks have finalized it. */
static void finish_communicator(cuda_thread *t, communicator *c, uint64_t begun) {
  ncclResult_t state = ncclInProgress;
  while (c->connected && state == ncclInProgress && now_ns() - begun < DRAIN_NS) {
    if (NCCL(ncclCommGetAsyncError, c->comm, &state)) return;
    cuda_thread_nap();
  }
}

static void finish_communicators(cuda_thread *t) {
  uint64_t begun = now_ns();
  for (communicator *c = t->communicators; c != NULL; c = c->next)
    if (c->connected && NCCL(ncclCommFinalize, c->comm)) c->connected = 0;
  for (communicator *c = t->communicators; c != NULL; c = c->next) finish_communicator(t, c, begun);
}

/* The caller guarantees that the devices of all ranks of `at` have passed all of its items, and that all ranks know. */
int cuda_thread_destroy_set(cuda_thread *t) {
  communicator *c = t->at;
  STEP(t->failure.call != NULL || cuda_thread_cancelled(t, "ncclCommFinalize"));
  STEP(cuda_thread_drain(t, 0)); /* before the abort, which waits for the device, too, but cannot be given up */
  if (c->connected && NCCL(ncclCommFinalize, c->comm) == 0) finish_communicator(t, c, now_ns());
  end_communicator(t, c);
  cuda_thread_remove_communicator(t, c);
  return t->failure.call != NULL ? -1 : 0;
}

/* Do CUDA_THREAD_CLOSE. `left` says afterwards whether something did not end. */
static void close_all(cuda_thread *t) {
  int whole = t->world.comm != NULL && t->world.connected && !t->quiet, well = t->failure.call == NULL && !load32_acquire(&t->cancelled);
  if (whole && !well) cuda_thread_quieten(t);
  if (t->stream != NULL && cuda_thread_drain(t, DRAIN_NS)) well = 0;
  if (whole && well && (!cuda_thread_passes_are_over(t, DRAIN_NS) || !cuda_thread_graphs_are_over(t, DRAIN_NS))) well = 0;
  if (whole && well) cuda_thread_look(t); /* the last samples */
  if (whole && well) cuda_thread_end_graphs(t, 1);
  if (whole && well) finish_communicators(t);
  end_communicators(t);
  cuda_thread_graphs_have_ended(t, DRAIN_NS);
  t->left = t->stream != NULL && !comes_to_rest(t);
  if (!t->left) store_release(&t->d.passed, UINT64_MAX); /* pairs with has_passed: tensors may be freed */
  if (t->context != NULL && !t->left) t->left = !see_visitors_out(t);
  if (t->context != NULL && !t->left) release_context(t);
}

void cuda_thread_work(cuda_thread *t, uint32_t job) {
  switch (job) {
    case CUDA_THREAD_IDENTIFY: identify(t); break;
    case CUDA_THREAD_PREPARE: prepare(t); break;
    case CUDA_THREAD_NAME:
      if (!cuda_thread_cancelled(t, "ncclGetUniqueId")) NCCL(ncclGetUniqueId, &t->id);
      break;
    case CUDA_THREAD_CONNECT: connect_all(t); break;
    case CUDA_THREAD_CLOSE: close_all(t); break;
  }
}
