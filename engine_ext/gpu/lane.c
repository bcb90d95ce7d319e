#include "lane.h"

#include <stdio.h>
#include <string.h>

enum { NAP_NS = 20000 };                      /* between two looks at something that goes on elsewhere */
static const uint64_t DRAIN_NS = 2000000000u; /* longest that a close waits for work on the stream */

const lane_function lane_function_list[LANE_FUNCTIONS] = {
#define X(name, parameters) {#name, 0},
    CUDA_FUNCTIONS(X)
#undef X
#define X(name, parameters, since) {#name, since},
    NCCL_FUNCTIONS(X) NCCL_TEXTS(X)
#undef X
};

/* ---- calls ---- */

static int failed(lane *l, const char *call, int code, const char *name, const char *text) {
  lane_failure *f = &l->failure;
  if (f->call == NULL) {
    f->call = call;
    f->code = code;
    snprintf(f->name, sizeof f->name, "%s", name != NULL ? name : "");
    snprintf(f->text, sizeof f->text, "%s", text != NULL ? text : "");
  }
  return -1;
}

static int cancelled(lane *l, const char *call) {
  return load32_acquire(&l->cancelled) ? failed(l, call, LANE_CANCELLED, NULL, NULL) : 0; /* pairs with its setting */
}

static int after_cuda(lane *l, const char *call, CUresult code) {
  const char *name = NULL, *text = NULL;
  store_pointer(&l->call, NULL);
  if (code == CUDA_SUCCESS) return 0;
  l->f.cuGetErrorName(code, &name);
  l->f.cuGetErrorString(code, &text);
  return failed(l, call, (int)code, name, text);
}

static int after_nccl(lane *l, const char *call, ncclResult_t code) {
  char text[sizeof l->failure.text];
  store_pointer(&l->call, NULL);
  if (code == ncclSuccess || code == ncclInProgress) return 0;
  snprintf(text, sizeof text, "%s: %s", l->f.ncclGetErrorString(code), l->f.ncclGetLastError(l->comm));
  return failed(l, call, (int)code, NULL, text);
}

/* A call, while others see which one it is; what it returned. */
#define IN_CALL(name, ...) (store_pointer(&l->call, (void *)#name), l->f.name(__VA_ARGS__))
/* Whether it failed, which is kept. */
#define CUDA(name, ...) after_cuda(l, #name, IN_CALL(name, __VA_ARGS__))
#define NCCL(name, ...) after_nccl(l, #name, IN_CALL(name, __VA_ARGS__))
/* The same for what may be given up: `return` if it was, or has failed. */
#define STEP(made) \
  if (made) return -1
#define CUDA_STEP(name, ...) STEP(cancelled(l, #name) || CUDA(name, __VA_ARGS__))
#define NCCL_STEP(name, ...) STEP(cancelled(l, #name) || NCCL(name, __VA_ARGS__))

static void nap(void) {
  struct timespec t = {0, NAP_NS};
  nanosleep(&t, NULL);
}

/* ---- which device it is ---- */

static int identify(lane *l) {
  lane_identity *i = &l->identity;
  CUuuid uuid;
  CUDA_STEP(cuInit, 0);
  CUDA_STEP(cuDriverGetVersion, &i->driver);
  CUDA_STEP(cuDeviceGetCount, &i->devices);
  CUDA_STEP(cuDeviceGet, &l->device, l->ordinal);
  CUDA_STEP(cuDeviceGetName, i->name, sizeof i->name, l->device);
  CUDA_STEP(cuDeviceGetUuid_v2, &uuid, l->device);
  memcpy(i->uuid, uuid.bytes, sizeof i->uuid);
  CUDA_STEP(cuDeviceGetPCIBusId, i->pci, sizeof i->pci, l->device);
  return 0;
}

/* ---- context, stream, kernels, events ---- */

/* Wait until the stream is empty, or for `limit`; 0: until it is or the job is given up. Returns 1 if it is not. */
static int drain(lane *l, uint64_t limit) {
  uint64_t begun = now_ns();
  for (;;) {
    CUresult code = IN_CALL(cuStreamQuery, l->stream);
    if (code != CUDA_ERROR_NOT_READY) return after_cuda(l, "cuStreamQuery", code);
    store_pointer(&l->call, NULL);
    if (limit != 0 ? now_ns() - begun > limit : cancelled(l, "cuStreamQuery")) return 1;
    nap();
  }
}

static int load_module(lane *l) {
  char log[sizeof l->failure.text] = "";
  CUjit_option options[] = {CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES};
  void *values[] = {log, (void *)(uintptr_t)sizeof log};
  STEP(cancelled(l, "cuModuleLoadDataEx"));
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
  return drain(l, 0);
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
  for (; l->n_events < LANE_EVENTS; l->n_events++)
    CUDA_STEP(cuEventCreate, &l->events[l->n_events], CU_EVENT_DISABLE_TIMING);
  return 0;
}

/* ---- the communicator ---- */

/* A communicator that does not block: ask until nothing is in progress, whatever the call before returned. */
static int settle(lane *l) {
  for (;;) {
    ncclResult_t state = ncclInProgress;
    NCCL_STEP(ncclCommGetAsyncError, l->comm, &state);
    if (state != ncclInProgress) return after_nccl(l, "ncclCommInitRankConfig", state);
    nap();
  }
}

static int connect_ranks(lane *l) {
  ncclConfig_t config = {
      .size = sizeof config,
      .magic = NCCL_API_MAGIC,
      .version = NCCL_CONFIG_VERSION,
      .blocking = 0, /* the one mode in which a communicator can be aborted at any time */
      .cgaClusterSize = NCCL_CONFIG_UNDEF_INT,
      .minCTAs = NCCL_CONFIG_UNDEF_INT,
      .maxCTAs = NCCL_CONFIG_UNDEF_INT,
      .netName = NULL,
      .splitShare = NCCL_CONFIG_UNDEF_INT,
  };
  NCCL_STEP(ncclCommInitRankConfig, &l->comm, l->size, l->id, l->rank, &config);
  STEP(settle(l));
  l->connected = 1;
  return 0;
}

/* ---- the end, of what there is ---- */

static void release_context(lane *l) {
  for (; l->n_events > 0; l->n_events--) CUDA(cuEventDestroy_v2, l->events[l->n_events - 1]);
  if (l->module != NULL) CUDA(cuModuleUnload, l->module);
  if (l->stream != NULL) CUDA(cuStreamDestroy_v2, l->stream);
  l->module = NULL;
  l->stream = NULL;
  CUDA(cuCtxSetCurrent, NULL);
  CUDA(cuDevicePrimaryCtxRelease_v2, l->device);
  l->context = NULL;
}

/* Kernels of NCCL that wait for a rank which does not come are told to end first, where NCCL can do that without
 * freeing what other ranks may still read; freeing is what an abort does. An abort is local: nobody waits for anybody. */
static void close_all(lane *l) {
  if (l->comm != NULL && l->connected && load32_acquire(&l->cancelled) && l->f.ncclCommRevoke != NULL)
    NCCL(ncclCommRevoke, l->comm, 0);
  if (l->stream != NULL) drain(l, DRAIN_NS);
  if (l->comm != NULL) NCCL(ncclCommAbort, l->comm);
  l->comm = NULL;
  l->connected = 0;
  l->left = l->stream != NULL && drain(l, DRAIN_NS) == 1;
  if (l->context != NULL && !l->left) release_context(l);
}

/* ---- the thread ---- */

static void work(lane *l, uint32_t job) {
  switch (job) {
    case LANE_IDENTIFY: identify(l); break;
    case LANE_PREPARE: prepare(l); break;
    case LANE_NAME:
      if (!cancelled(l, "ncclGetUniqueId")) NCCL(ncclGetUniqueId, &l->id);
      break;
    case LANE_CONNECT: connect_ranks(l); break;
    case LANE_CLOSE: close_all(l); break;
  }
}

static void *run(void *argument) {
  lane *l = argument;
  for (;;) {
    uint32_t count = door_count(&l->door), job = load32_acquire(&l->job); /* pairs with lane_begin */
    if (job == LANE_NOTHING) {
      door_sleep(&l->door, count, 0);
      continue;
    }
    work(l, job);
    store32_release(&l->job, LANE_NOTHING); /* pairs with lane_wait */
    door_ring(&l->ended, DOOR_EVERYBODY);
    if (job == LANE_CLOSE) return NULL;
  }
}

int lane_start(lane *l) { return engine_thread_start(&l->thread, run, l); }

void lane_begin(lane *l, uint32_t job) {
  store32_release(&l->job, job); /* pairs with the thread's look */
  door_ring(&l->door, 1);
}

int lane_wait(lane *l, uint64_t ns) {
  uint32_t count = door_count(&l->ended);
  if (load32_acquire(&l->job) != LANE_NOTHING) door_sleep(&l->ended, count, ns); /* pairs with the thread's release */
  return load32_acquire(&l->job) == LANE_NOTHING;
}

void lane_join(lane *l) { pthread_join(l->thread, NULL); }
