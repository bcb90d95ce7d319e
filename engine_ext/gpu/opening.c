/* The lane's jobs: what is opened, and how it is ended. */
#include "calls.h"

#include <stdlib.h>
#include <string.h>

static const uint64_t DRAIN_NS = 2000000000u; /* longest wait for work on the stream that has to end */

/* ---- which device it is ---- */

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

static int load_module(lane *l) {
  char log[sizeof l->failure.text] = "";
  CUjit_option options[] = {CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES};
  void *values[] = {log, (void *)(uintptr_t)sizeof log};
  STEP(lane_cancelled(l, "cuModuleLoadDataEx"));
  if (CUDA(cuModuleLoadDataEx, &l->module, l->image, 2, options, values) == 0) return 0;
  if (log[0] != 0) memcpy(l->failure.text, log, sizeof log);
  return -1;
}

/* A kernel that is loaded at its first launch may have to wait for all that runs then, so each is launched now, with a
 * plan of no rows and a reduction of no elements: whatever its parameters are, they are 0. */
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
  /* Another thread may be capturing a graph, which our calls must not spoil. After the context: it might make one. */
  CUDA_STEP(cuThreadExchangeStreamCaptureMode, &mode);
  CUDA_STEP(cuCtxGetStreamPriorityRange, &least, &greatest);
  CUDA_STEP(cuStreamCreateWithPriority, &l->stream, CU_STREAM_NON_BLOCKING, greatest);
  STEP(load_module(l));
  STEP(launch_kernels(l));
  if (lane_table_bytes(2, l->slab_bytes) > l->table_bytes / 4) /* a table of the whole slab has to go into the ring */
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

/* An abort is local: nobody waits for anybody. */
static void end_communicator(lane *l, communicator *c) {
  if (c->comm != NULL) NCCL(ncclCommAbort, c->comm);
  c->comm = NULL;
  c->connected = 0;
}

/* Several are ended in one group: what the first frees waits for all that the device does, so kernels of the others that wait for a rank
 * have to be told to end before. */
static void end_communicators(lane *l) {
  communicator *c;
  int several;
  lane_end_graphs(l, 0);
  c = l->communicators;
  several = c != NULL && c->next != NULL;
  if (several) NCCL(ncclGroupStart);
  for (; c != NULL; c = c->next)
    if (c->connected) end_communicator(l, c);
  for (c = l->communicators; c != NULL; c = c->next) end_communicator(l, c); /* one that is half made waits for its own thread */
  if (several) NCCL(ncclGroupEnd);
}

/* Whether the stream is empty soon, and frozen passes are over. */
static int comes_to_rest(lane *l) { return lane_drain(l, DRAIN_NS) != 1 && lane_passes_are_over(l, DRAIN_NS); }

/* Kernels of NCCL that wait for a rank which does not come are told to end first, where NCCL can do that without
 * freeing what other ranks may still read; freeing is what an abort does. */
void lane_quieten(lane *l) {
  int busy = 1;
  if (lane_has_captured(l)) lane_end_graphs(l, 0); /* a revocation is over some time, and a graph may be launched then */
  if (l->f.ncclCommRevoke != NULL) {
    for (communicator *c = l->communicators; c != NULL; c = c->next)
      if (c->comm != NULL) NCCL(ncclCommRevoke, c->comm, 0);
    busy = !comes_to_rest(l);
  }
  if (busy) {
    end_communicators(l);
    busy = !comes_to_rest(l);
  }
  if (!busy) store_release(&l->d.passed, UINT64_MAX); /* pairs with has_passed: tensors may go */
  l->quiet = 1;
}

/* Of a warm-up that fails kernels may still read other ranks' memory: the job ends when they have ended. */
static int warm_up(lane *l) {
  if (lane_warm_up(l) == 0) return 0;
  if (!l->world.connected) lane_quieten(l); /* else the thread does, when the world has been told */
  return -1;
}

int lane_join_ranks(lane *l, int blocking) {
  communicator *c = l->at;
  ncclConfig_t config = {
      .size = sizeof config,
      .magic = NCCL_API_MAGIC,
      .version = NCCL_CONFIG_VERSION,
      .blocking = blocking, /* 0: the one mode in which a communicator can be aborted at any time */
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

/* ---- the end, of what there is ---- */

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

/* Threads of the program that are between enter and leave still use it all (streams.c). Whether they have gone: a call of CUDA may not
 * return. */
static int see_visitors_out(lane *l) {
  uint64_t begun = now_ns();
  or32(&l->visitors, LANE_CLOSED); /* pairs with enter */
  while ((load32_acquire(&l->visitors) & ~LANE_CLOSED) != 0) {
    if (now_ns() - begun > DRAIN_NS) return 0;
    lane_nap();
  }
  return 1;
}

/* What graphs may need comes last: a keeper frees it with the context, at once if the last graph goes now. */
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
  left = lane_release_passes(l, DRAIN_NS); /* and so are the kernels, and the context */
  if (l->module != NULL && !left) CUDA(cuModuleUnload, l->module);
  l->tables = NULL;
  l->device_tables = l->slab = 0;
  l->module = NULL;
  l->stream = NULL;
  CUDA(cuCtxSetCurrent, NULL);
  if (!left) CUDA(cuDevicePrimaryCtxRelease_v2, l->device);
  l->context = NULL;
}

/* Let NCCL's own threads send to other hosts what they still have, which an abort would drop. It ends when all ranks have come. */
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

/* All of its ranks have been told that the device of each has passed all that it was given among them. */
int lane_part_ranks(lane *l) {
  communicator *c = l->at;
  STEP(l->failure.call != NULL || lane_cancelled(l, "ncclCommFinalize"));
  STEP(lane_drain(l, 0)); /* an abort waits for the device, and cannot be given up */
  if (c->connected && NCCL(ncclCommFinalize, c->comm) == 0) finish_communicator(l, c, now_ns());
  end_communicator(l, c);
  lane_strike(l, c);
  return l->failure.call != NULL ? -1 : 0;
}

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
  if (!l->left) store_release(&l->d.passed, UINT64_MAX); /* pairs with has_passed: tensors may go */
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
