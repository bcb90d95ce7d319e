/* Calls and groups of calls: what one thread collects, and how it gets onto the device.
 *
 * A blocking communicator puts its kernel on the stream in the call. A non-blocking one does it later, from a thread of
 * its own: until then ncclCommGetAsyncError says ncclInProgress, whatever the call returned.
 */
#include "internal.h"

#define API STAND_API ncclResult_t

enum { ROOM = 4096 };
static __thread int depth, n_tasks, n_aborts;
static __thread task *tasks;
static __thread ncclComm_t aborts[64];
static __thread ncclResult_t spoilt;

int group_depth(void) { return depth; }
void group_abort(ncclComm_t comm) { aborts[n_aborts++] = comm; }

/* ---- launching ---- */

static void number_tasks(launch *l) {
  struct ncclComm *c = l->comm;
  for (int i = 0; i < l->n; i++) {
    task *t = &l->tasks[i];
    t->sequence = t->what.function == SEND   ? c->sent[t->what.root]++
                  : t->what.function == RECV ? c->received[t->what.root]++
                                             : c->collectives++;
  }
}

/* A launch of a graph meets those of the peers' graphs: it is numbered when it is launched, and not in the capture. */
static void *launch_again(void *data) {
  const launch *captured = data;
  size_t size = sizeof *captured + sizeof(task) * (size_t)captured->n;
  launch *l = malloc(size);
  memcpy(l, captured, size);
  number_tasks(l);
  l->comm->pending++;
  return l;
}

static void released(void *data) { ((launch *)data)->comm->graphs--; }

static ncclResult_t enqueue(launch *l, int captured) {
  stand_access *accesses = malloc(sizeof *accesses * 2 * (size_t)l->n);
  stand_operation what = {.step = launch_step,
                          .wanted = launch_wanted,
                          .want = launch_want,
                          .describe = launch_describe,
                          .drop = free,
                          .again = launch_again,
                          .released = released,
                          .data = l,
                          .accesses = accesses};
  struct ncclComm *c = l->comm;
  char name[64];
  CUresult failed;
  for (int i = 0; i < l->n; i++) {
    const task *t = &l->tasks[i];
    size_t n = t->what.count * dtype_size(t->what.dtype), all = n * (size_t)c->n;
    int is_root = c->rank == t->what.root, f = t->what.function;
    if (f != RECV && (f != BROADCAST || is_root))
      accesses[what.n_accesses++] = (stand_access){(uintptr_t)t->from, f == REDUCE_SCATTER ? all : n, 0};
    if (f != SEND && (f != REDUCE || is_root))
      accesses[what.n_accesses++] = (stand_access){(uintptr_t)t->to, f == ALL_GATHER ? all : n, 1};
  }
  snprintf(name, sizeof name, l->n > 1 ? "group of %s" : "%s", function_names[l->tasks[0].what.function]);
  what.what = name;
  stand_lock();
  if (captured) c->graphs++;
  else c->pending++;
  failed = stand_enqueue(l->tasks[0].stream, &what);
  if (failed && captured) c->graphs--;
  else if (failed) c->pending--;
  stand_unlock();
  free(accesses);
  return failed ? refuse(c, ncclUnhandledCudaError, "Cuda failure %u", (unsigned)failed) : ncclSuccess;
}

static void *launch_later(void *argument) {
  launch *l = argument;
  struct ncclComm *c = l->comm;
  ncclResult_t result;
  stand_sleep((double)(stand_random() % 5000) / 1e3);
  cuCtxSetCurrent(c->context);
  result = connect_ranks(l);
  if (!result) result = enqueue(l, 0);
  STORE(c->state, (int)result);
  return NULL;
}

static ncclResult_t start(launch *l) {
  struct ncclComm *c = l->comm;
  ncclResult_t result;
  for (int i = 1; i < l->n; i++)
    if (l->tasks[i].stream != l->tasks[0].stream)
      return refuse(c, ncclInvalidUsage, "the stand-in has one stream a group");
  int captured = stand_captures(l->tasks[0].stream);
  if (captured && !c->blocking)
    return refuse(c, ncclInvalidUsage, "the stand-in captures with communicators that block");
  if (!captured) number_tasks(l);
  if (c->blocking) {
    result = connect_ranks(l);
    return result ? result : enqueue(l, captured);
  }
  STORE(c->state, ncclInProgress);
  in_background(launch_later, l);
  return stand_random() % 4 ? ncclInProgress : ncclSuccess; /* whoever does not ask, does not know */
}

static ncclResult_t launch_all(void) {
  ncclResult_t result = spoilt;
  while (n_tasks && !result) {
    ncclComm_t comm = tasks[0].comm;
    launch *l = calloc(1, sizeof *l + sizeof(task) * (size_t)n_tasks);
    int left = 0;
    ncclResult_t one;
    l->comm = comm;
    for (int i = 0; i < n_tasks; i++)
      if (tasks[i].comm == comm) l->tasks[l->n++] = tasks[i];
      else tasks[left++] = tasks[i];
    n_tasks = left;
    one = start(l);
    if (one && one != ncclInProgress) result = one;
    else if (!result) result = one;
    if (result == ncclInProgress && n_tasks) result = ncclSuccess;
  }
  n_tasks = 0;
  spoilt = ncclSuccess;
  if (n_aborts) abort_all(aborts, n_aborts);
  n_aborts = 0;
  return result;
}

API ncclGroupStart(void) {
  depth++;
  return ncclSuccess;
}

API ncclGroupEnd(void) {
  ncclResult_t refused;
  if (!depth) return refuse(NULL, ncclInvalidUsage, "ncclGroupEnd: not in a group call.");
  if (depth > 1) return depth--, ncclSuccess;
  refused = nccl_enter(__func__, NULL, 0);
  depth = 0;
  if (refused) return n_tasks = 0, refused;
  return nccl_leave(launch_all());
}

/* ---- the calls ---- */

static ncclResult_t call(const char *name, int function, const void *from, void *to, size_t count, ncclDataType_t dtype,
                         int op, int root, ncclComm_t comm, CUstream stream) {
  ncclResult_t result = nccl_enter(name, comm, 0);
  size_t size = dtype_size((int)dtype);
  task t = {.comm = comm, .stream = stream, .from = from, .to = to, .what = {function, (int)dtype, op, root, count}};
  if (result) {
    if (depth) spoilt = result;
    return result;
  }
  if (comm->state)
    result =
        refuse(comm, (ncclResult_t)comm->state, "%s", comm->error[0] ? comm->error : "the communicator has failed");
  else if (!size || op < 0 || op > ncclAvg)
    result = refuse(comm, ncclInvalidArgument, "%s: type %u, operation %d", name, dtype, op);
  else if (root < 0 || root >= comm->n) result = refuse(comm, ncclInvalidArgument, "%s: no rank %d", name, root);
  else if (count * size * (size_t)(function == REDUCE_SCATTER ? comm->n : 1) > WINDOW)
    result = refuse(comm, ncclInvalidArgument, "%s: the stand-in moves 1 GiB a call, not %zu of %zu bytes", name, count,
                    size);
  if (result || n_tasks == ROOM) {
    if (depth) spoilt = result;
    return nccl_leave(result ? result : refuse(comm, ncclInvalidUsage, "too many calls in a group"));
  }
  if (!tasks) tasks = malloc(sizeof *tasks * ROOM);
  if (count) tasks[n_tasks++] = t; /* nothing to move is no call */
  return nccl_leave(depth ? ncclSuccess : launch_all());
}

API ncclAllReduce(const void *from, void *to, size_t count, ncclDataType_t dtype, ncclRedOp_t op, ncclComm_t comm,
                  cudaStream_t stream) {
  return call(__func__, ALL_REDUCE, from, to, count, dtype, (int)op, 0, comm, stream);
}

API ncclBroadcast(const void *from, void *to, size_t count, ncclDataType_t dtype, int root, ncclComm_t comm,
                  cudaStream_t stream) {
  return call(__func__, BROADCAST, from, to, count, dtype, 0, root, comm, stream);
}

API ncclReduce(const void *from, void *to, size_t count, ncclDataType_t dtype, ncclRedOp_t op, int root,
               ncclComm_t comm, cudaStream_t stream) {
  return call(__func__, REDUCE, from, to, count, dtype, (int)op, root, comm, stream);
}

API ncclAllGather(const void *from, void *to, size_t count, ncclDataType_t dtype, ncclComm_t comm,
                  cudaStream_t stream) {
  return call(__func__, ALL_GATHER, from, to, count, dtype, 0, 0, comm, stream);
}

API ncclReduceScatter(const void *from, void *to, size_t count, ncclDataType_t dtype, ncclRedOp_t op, ncclComm_t comm,
                      cudaStream_t stream) {
  return call(__func__, REDUCE_SCATTER, from, to, count, dtype, (int)op, 0, comm, stream);
}

API ncclSend(const void *from, size_t count, ncclDataType_t dtype, int peer, ncclComm_t comm, cudaStream_t stream) {
  return call(__func__, SEND, from, NULL, count, dtype, 0, peer, comm, stream);
}

API ncclRecv(void *to, size_t count, ncclDataType_t dtype, int peer, ncclComm_t comm, cudaStream_t stream) {
  return call(__func__, RECV, NULL, to, count, dtype, 0, peer, comm, stream);
}
