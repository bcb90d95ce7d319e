/* Making and ending communicators. Ranks meet in memory that the id names: a descriptor of the process that asked for
 * the id. */
#include "internal.h"

#include <fcntl.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <unistd.h>

#define API STAND_API ncclResult_t

static __thread char last_error[256];
static struct ncclComm *communicators;
static int n_communicators;
static pthread_mutex_t door = PTHREAD_MUTEX_INITIALIZER;
static pthread_t inside;
static int is_inside;
static const char *inside_call;
static pid_t owner;

/* ---- the door ---- */

ncclResult_t refuse(ncclComm_t comm, ncclResult_t code, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(last_error, sizeof last_error, format, arguments);
  va_end(arguments);
  if (comm) snprintf(comm->error, sizeof comm->error, "%s", last_error);
  return code;
}

/* NCCL allows one thread at a time for a device, on whatever communicators; a thread of its own may end a blocking one
 * meanwhile. */
static int ends_one(const char *call, ncclComm_t comm) {
  return !strcmp(call, "ncclCommAbort") || !strcmp(call, "ncclCommRevoke") ||
         (!strcmp(call, "ncclCommFinalize") && comm && comm->blocking);
}

ncclResult_t nccl_enter(const char *call, ncclComm_t comm, int may_be_in_progress) {
  const char *one = getenv("STAND_ONE_THREAD"), *linger = getenv("STAND_LINGER"); /* ms that a call takes */
  int ends = ends_one(call, comm), code = stand_injected(call);
  pthread_mutex_lock(&door);
  if (!owner) owner = getpid();
  if (owner != getpid())
    fprintf(stderr, "stand-in: %s was called in a child of the process that initialised NCCL\n", call), abort();
  if (is_inside && !pthread_equal(inside, pthread_self()) && !(ends && comm && comm->blocking)) {
    stand_found("two threads are in NCCL at once: %s and %s", inside_call, call);
    abort();
  }
  if (one && atoi(one) && comm && comm->user && !pthread_equal(comm->user, pthread_self()) && !(ends && comm->blocking)) {
    stand_found("%s is called by another thread than the one that made communicator %d", call, comm->number);
    abort();
  }
  if (!ends) {
    is_inside = 1;
    inside = pthread_self();
    inside_call = call;
  }
  pthread_mutex_unlock(&door);
  if (linger) stand_sleep(strtod(linger, NULL));
  if (code) return nccl_leave(refuse(comm, (ncclResult_t)code, "%s failed by order of the test", call));
  if (comm && !may_be_in_progress && LOAD(comm->state) == ncclInProgress) {
    stand_found("%s is called while communicator %d is in progress", call, comm->number);
    return nccl_leave(refuse(comm, ncclInvalidArgument,
                             "Attempt to use communicator before the previous operation returned ncclSuccess"));
  }
  if (comm && comm->revoked && !may_be_in_progress)
    return nccl_leave(refuse(comm, ncclInvalidUsage, "communicator was revoked"));
  return ncclSuccess;
}

ncclResult_t nccl_leave(ncclResult_t result) {
  pthread_mutex_lock(&door);
  if (is_inside && pthread_equal(inside, pthread_self())) is_inside = 0;
  pthread_mutex_unlock(&door);
  return result;
}

#define ENTER(comm, in_progress)                                    \
  do {                                                              \
    ncclResult_t refused = nccl_enter(__func__, comm, in_progress); \
    if (refused) return refused;                                    \
  } while (0)

int is_dead(int pid) {
  char path[64], text[256] = "", *end;
  FILE *file;
  snprintf(path, sizeof path, "/proc/%d/stat", pid);
  if (!(file = fopen(path, "r"))) return 1;
  if (!fgets(text, sizeof text, file)) text[0] = 0;
  fclose(file);
  end = strrchr(text, ')');
  return end && (end[2] == 'Z' || end[2] == 'X');
}

void in_background(void *(*body)(void *), void *argument) {
  pthread_t thread;
  pthread_create(&thread, NULL, body, argument);
  pthread_detach(thread);
}

/* ---- texts and facts ---- */

API ncclGetVersion(int *version) {
  *version = STAND_NCCL_VERSION;
  return ncclSuccess;
}

STAND_API const char *ncclGetErrorString(ncclResult_t result) {
  static const char *texts[] = {"no error",
                                "unhandled cuda error",
                                "unhandled system error",
                                "internal error",
                                "invalid argument",
                                "invalid usage",
                                "remote process exited or there was a network error",
                                "NCCL operation in progress"};
  return result < sizeof texts / sizeof *texts ? texts[result] : "unknown result code";
}

STAND_API const char *ncclGetLastError(ncclComm_t comm) { return comm ? comm->error : last_error; }

API ncclCommCount(const ncclComm_t comm, int *count) { return *count = comm->n, ncclSuccess; }
API ncclCommCuDevice(const ncclComm_t comm, int *device) { return *device = comm->device, ncclSuccess; }
API ncclCommUserRank(const ncclComm_t comm, int *rank) { return *rank = comm->rank, ncclSuccess; }

API ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error) {
  ENTER(comm, 1);
  *error = (ncclResult_t)LOAD(comm->state);
  return nccl_leave(ncclSuccess);
}

/* ---- the id ---- */

API ncclGetUniqueId(ncclUniqueId *id) {
  static uint64_t count;
  uint64_t nonce;
  int fd;
  ENTER(NULL, 0);
  fd = memfd_create("stand-in nccl communicator", MFD_CLOEXEC);
  nonce = (stand_seed_now() << 20) + ++count;
  memset(id, 0, sizeof *id);
  if (fd < 0 || ftruncate(fd, sizeof(shared)) || pwrite(fd, &nonce, sizeof nonce, 0) != sizeof nonce)
    return nccl_leave(refuse(NULL, ncclSystemError, "no memory for an id"));
  snprintf(id->internal, sizeof id->internal, "stand-in %d %d %llu", (int)getpid(), fd, (unsigned long long)nonce);
  return nccl_leave(ncclSuccess);
}

/* ---- init ---- */

typedef struct opening {
  struct ncclComm *comm;
  ncclUniqueId id;
} opening;

static ncclResult_t attach(opening *o) {
  struct ncclComm *c = o->comm;
  size_t size = (sizeof(shared) + 4095) & ~(size_t)4095;
  size_t all = size + WINDOW * (size_t)(c->n + c->n * c->n);
  unsigned long long nonce;
  char path[64];
  int pid, there, fd;
  char *at;
  if (sscanf(o->id.internal, "stand-in %d %d %llu", &pid, &there, &nonce) != 3)
    return refuse(c, ncclInvalidArgument, "no id");
  snprintf(path, sizeof path, "/proc/%d/fd/%d", pid, there);
  fd = open(path, O_RDWR | O_CLOEXEC);
  if (fd < 0) return refuse(c, ncclRemoteError, "the process that made the id is gone");
  if (ftruncate(fd, (off_t)all)) return close(fd), refuse(c, ncclSystemError, "no memory");
  at = mmap(NULL, all, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  close(fd);
  if (at == MAP_FAILED) return refuse(c, ncclSystemError, "no memory");
  c->windows = at + size;
  STORE(c->common, (shared *)at);
  return c->common->nonce == nonce ? ncclSuccess : refuse(c, ncclInvalidArgument, "an old id");
}

/* From 2.30 on ranks may have one device, if the environment says so. */
static int shares_devices(void) {
  const char *setting = getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  return STAND_NCCL_VERSION >= 23000 && setting != NULL && !strcmp(setting, "1");
}

static ncclResult_t meet(struct ncclComm *c) {
  struct rank_page *self = &c->common->ranks[c->rank];
  CUuuid uuid;
  CUresult failed = cuCtxSetCurrent(c->context);
  if (!failed) failed = cuDeviceGetUuid_v2(&uuid, c->device);
  if (failed) return refuse(c, ncclUnhandledCudaError, "Cuda failure %u", (unsigned)failed);
  memcpy(self->device, uuid.bytes, 16);
  self->pid = (int)getpid();
  self->version = STAND_NCCL_VERSION;
  self->n_ranks = c->n;
  STORE(self->present, 1);
  for (int r = 0; r < c->n;) {
    if (c->aborting) return refuse(c, ncclInternalError, "aborted");
    if (LOAD(c->common->ranks[r].present)) r++;
    else stand_sleep(0.1);
    for (int other = 0; other < c->n; other++)
      if (LOAD(c->common->ranks[other].present) && !LOAD(c->common->ranks[other].called) &&
          is_dead(c->common->ranks[other].pid))
        return refuse(c, ncclRemoteError, "rank %d exited during init", other);
  }
  for (int r = 0; r < c->n; r++) {
    const struct rank_page *p = &c->common->ranks[r];
    if (p->version != self->version)
      return refuse(c, ncclInvalidUsage, "Mismatched NCCL version detected : rank %d version %d rank %d version %d",
                    c->rank, self->version, r, p->version);
    if (p->n_ranks != self->n_ranks)
      return refuse(c, ncclInvalidArgument, "rank %d expects %d ranks, not %d", r, p->n_ranks, c->n);
    for (int other = 0; other < r; other++)
      if (!shares_devices() && !memcmp(p->device, c->common->ranks[other].device, 16))
        return refuse(c, ncclInvalidUsage, "Duplicate GPU detected : rank %d and rank %d both on CUDA device %d", other,
                      r, c->device);
  }
  return ncclSuccess;
}

static void *open_ranks(void *argument) {
  opening *o = argument;
  struct ncclComm *c = o->comm;
  ncclResult_t result;
  if (!c->blocking) stand_sleep((double)(stand_random() % 3000) / 1e3);
  result = attach(o);
  if (!result) result = meet(c);
  STORE(c->state, (int)result);
  free(o);
  return NULL;
}

API ncclCommInitRankConfig(ncclComm_t *made, int n, ncclUniqueId id, int rank, ncclConfig_t *config) {
  struct ncclComm *c;
  opening *o;
  *made = NULL;
  ENTER(NULL, 0);
  if (n < 1 || n > RANKS || rank < 0 || rank >= n)
    return nccl_leave(refuse(NULL, ncclInvalidArgument, "rank %d of %d", rank, n));
  if (config && (config->magic != NCCL_API_MAGIC || config->size < 24 || config->version < NCCL_CONFIG_VERSION))
    return nccl_leave(
        refuse(NULL, ncclInvalidArgument, "ncclConfig_t argument not initialized via NCCL_CONFIG_INITIALIZER"));
  c = calloc(1, sizeof *c);
  c->n = n;
  c->rank = rank;
  c->blocking = !config || config->blocking != 0;
  c->number = n_communicators++;
  c->user = pthread_self();
  if (cuCtxGetCurrent(&c->context) || !c->context || cuCtxGetDevice(&c->device)) {
    free(c);
    return nccl_leave(refuse(NULL, ncclUnhandledCudaError, "no CUDA context is current in this thread"));
  }
  c->next = communicators;
  communicators = c;
  o = malloc(sizeof *o);
  *o = (opening){c, id};
  *made = c;
  if (c->blocking) {
    open_ranks(o);
    return nccl_leave((ncclResult_t)c->state);
  }
  c->state = ncclInProgress;
  in_background(open_ranks, o);
  return nccl_leave(ncclInProgress);
}

/* ---- first use ---- */

/* The first call that needs a connection waits for its peers: on the host. */
ncclResult_t connect_ranks(launch *l) {
  struct ncclComm *c = l->comm;
  for (int i = 0; i < l->n; i++) {
    task *t = &l->tasks[i];
    int sends = t->what.function == SEND;
    struct channel *way = t->what.function < SEND
                              ? NULL
                              : &c->common->channels[sends ? c->rank : t->what.root][sends ? t->what.root : c->rank];
    if (way) STORE(way->called[!sends], 1);
    else STORE(c->common->ranks[c->rank].called, 1);
  }
  for (int i = 0; i < l->n; i++) {
    task *t = &l->tasks[i];
    int sends = t->what.function == SEND;
    for (int r = 0; r < c->n;) {
      int there = t->what.function < SEND ? c->connected || LOAD(c->common->ranks[r].called)
                  : r != t->what.root
                      ? 1
                      : LOAD(c->common->channels[sends ? c->rank : r][sends ? r : c->rank].called[sends]);
      if (c->aborting) return refuse(c, ncclInternalError, "aborted");
      if (there) r++;
      else if (is_dead(c->common->ranks[r].pid))
        return refuse(c, ncclRemoteError, "rank %d exited before it connected", r);
      else stand_sleep(0.1);
    }
    if (t->what.function < SEND) c->connected = 1;
  }
  return ncclSuccess;
}

/* ---- the end ---- */

/* Waits for something that other ranks do, and says so if they do not. */
static ncclResult_t ranks_reach(struct ncclComm *c, size_t word, const char *what) {
  double waited = 0;
  for (int r = 0; r < c->n;) {
    if (LOAD(*(int *)((char *)&c->common->ranks[r] + word)) || LOAD(c->common->ranks[r].aborted)) r++;
    else if (c->aborting) return refuse(c, ncclInternalError, "aborted");
    else if (waited > stand_deadline_now()) {
      stand_found("deadlock: %s of communicator %d waits for rank %d", what, c->number, r);
      return refuse(c, ncclInternalError, "%s: rank %d did not come", what, r);
    } else stand_sleep(0.2), waited += 0.2;
  }
  return ncclSuccess;
}

static void drain(struct ncclComm *c) {
  double waited = 0;
  for (; LOAD(c->pending) && waited < stand_deadline_now(); waited += 0.2) stand_poke(), stand_sleep(0.2);
  if (LOAD(c->pending)) stand_found("deadlock: the end of communicator %d waits for its kernels", c->number);
}

/* The end of a communicator waits for the graphs that have its launches, without a limit. */
static void await_graphs(struct ncclComm *c) {
  while (LOAD(c->graphs)) stand_sleep(0.2);
}

static void *finalize(void *argument) {
  struct ncclComm *c = argument;
  drain(c);
  await_graphs(c);
  STORE(c->common->ranks[c->rank].finalized, 1);
  STORE(c->state, (int)ranks_reach(c, offsetof(struct rank_page, finalized), "ncclCommFinalize"));
  return NULL;
}

API ncclCommFinalize(ncclComm_t comm) {
  ENTER(comm, 0);
  if (comm->blocking) {
    finalize(comm);
    return nccl_leave((ncclResult_t)comm->state);
  }
  STORE(comm->state, ncclInProgress);
  in_background(finalize, comm);
  return nccl_leave(ncclInProgress);
}

/* Within a machine all ranks come together here. What is left of the communicator stays: its operations may name it. */
API ncclCommDestroy(ncclComm_t comm) {
  ncclResult_t result;
  ENTER(comm, 0);
  drain(comm);
  await_graphs(comm);
  STORE(comm->common->ranks[comm->rank].destroyed, 1);
  result = ranks_reach(comm, offsetof(struct rank_page, destroyed), "ncclCommDestroy");
  return nccl_leave(result);
}

/* The flags of all go up before one frees: freeing waits for every kernel on the device, and those wait for their
 * peers. */
void abort_all(ncclComm_t *comms, int n) {
  double waited = 0;
  int held;
  for (int i = 0; i < n; i++) {
    comms[i]->freed = comms[i]->aborting = 1;
    if (comms[i]->common) STORE(comms[i]->common->ranks[comms[i]->rank].aborted, 1);
  }
  stand_poke();
  for (;; waited += 0.2) {
    stand_lock();
    held = launches_held;
    for (int i = 0; i < n; i++) held += comms[i]->pending;
    stand_unlock();
    if (!held || waited > stand_deadline_now()) break;
    stand_poke();
    stand_sleep(0.2);
  }
  if (held) stand_found("deadlock: ncclCommAbort waits for %d kernels on the device that wait for their peers", held);
  for (int i = 0; i < n; i++) await_graphs(comms[i]);
  for (int i = 0; i < n; i++)
    if (comms[i]->common) STORE(comms[i]->common->ranks[comms[i]->rank].gone, 1);
}

API ncclCommAbort(ncclComm_t comm) {
  ENTER(comm, 1);
  if (group_depth() && STAND_NCCL_VERSION >= 22400) group_abort(comm);
  else abort_all(&comm, 1);
  return nccl_leave(ncclSuccess);
}

#if STAND_NCCL_VERSION >= 22807
/* What is enqueued ends; then the flag goes down again, and a graph that is launched later waits for its peers. */
static void *end_launches(void *argument) {
  struct ncclComm *c = argument;
  while (!c->revoking && LOAD(c->state) == ncclInProgress) stand_sleep(0.2); /* an earlier call may still enqueue something */
  while (LOAD(c->pending)) stand_poke(), stand_sleep(0.2);
  stand_lock();
  if (!c->freed) c->aborting = 0;
  stand_unlock();
  if (c->revoking) STORE(c->state, (int)ncclSuccess);
  return NULL;
}

/* The flag alone: kernels end, nothing is freed. */
API ncclCommRevoke(ncclComm_t comm, int flags) {
  ENTER(comm, 1);
  if (flags) return nccl_leave(refuse(comm, ncclInvalidArgument, "flags must be 0"));
  comm->aborting = comm->revoked = 1;
  if (comm->common) STORE(comm->common->ranks[comm->rank].aborted, 1);
  stand_poke();
  if (comm->blocking) {
    end_launches(comm);
    return nccl_leave(ncclSuccess);
  }
  comm->revoking = LOAD(comm->state) == ncclSuccess;
  if (comm->revoking) STORE(comm->state, ncclInProgress);
  in_background(end_launches, comm);
  return nccl_leave(ncclInProgress);
}
#endif

/* ---- memory ---- */

#if STAND_NCCL_VERSION >= 21900
API ncclMemAlloc(void **at, size_t size) {
  CUdeviceptr made;
  ENTER(NULL, 0);
  if (cuMemAlloc_v2(&made, size)) return nccl_leave(refuse(NULL, ncclUnhandledCudaError, "out of memory"));
  *at = (void *)(uintptr_t)made;
  return nccl_leave(ncclSuccess);
}

API ncclMemFree(void *at) {
  ENTER(NULL, 0);
  return nccl_leave(cuMemFree_v2((CUdeviceptr)(uintptr_t)at) ? ncclUnhandledCudaError : ncclSuccess);
}
#endif
