/* What a launch does when the device comes to it. Under the lock of the stand-in for libcuda, a step at a time.
 *
 * A collective puts its data into this rank's window, says so, and goes on when all ranks have: then it reads the
 * windows of all. A send puts its data into the window of its channel and ends when the receiver has taken it: the
 * strictest that is allowed.
 */
#include "internal.h"

#include <sys/mman.h>

const char *const function_names[] = {"AllReduce", "Broadcast", "Reduce", "AllGather", "ReduceScatter", "Send", "Recv"};
int launches_held;

static size_t bytes(const task *t) { return t->what.count * dtype_size(t->what.dtype); }

static char *window_of(const struct ncclComm *c, int rank) { return c->windows + WINDOW * (size_t)rank; }

static char *window_between(const struct ncclComm *c, int from, int to) {
  return c->windows + WINDOW * (size_t)(c->n + from * c->n + to);
}

static void *device(const void *at) { return stand_pointer((CUdeviceptr)(uintptr_t)at); }

static void forget(char *window, size_t size) { /* large ones are given back */
  if (size > (1 << 20)) madvise(window, (size + 4095) & ~(size_t)4095, MADV_REMOVE);
}

static void describe(const description *d, char *text, size_t size) {
  snprintf(text, size, "%s of %zu %s, op %d, root %d", function_names[d->function], d->count, dtype_names[d->dtype],
           d->op, d->root);
}

/* ---- collectives ---- */

static int all_ranks(const struct ncclComm *c, uint64_t wanted, int done) {
  for (int r = 0; r < c->n; r++)
    if ((done ? LOAD(c->common->ranks[r].done) : LOAD(c->common->ranks[r].posted)) < wanted) return 0;
  return 1;
}

static void compare(task *t) {
  const struct ncclComm *c = t->comm;
  char mine[128], theirs[128];
  for (int r = 0; r < c->n && !t->stuck; r++) {
    const description *d = &c->common->ranks[r].calls[t->sequence % RING];
    if (!memcmp(d, &t->what, sizeof *d)) continue;
    describe(&t->what, mine, sizeof mine);
    describe(d, theirs, sizeof theirs);
    stand_found(
        "mismatch in call %llu of communicator %d: rank %d calls %s, rank %d calls %s: it would hang, or give wrong "
        "data",
        (unsigned long long)t->sequence, c->number, c->rank, mine, r, theirs);
    t->stuck = 1;
  }
}

static void move(task *t) {
  struct ncclComm *c = t->comm;
  uint64_t seed = c->common->nonce * 31 + t->sequence * 1000003;
  char *from[RANKS];
  size_t n = bytes(t);
  for (int r = 0; r < c->n; r++) from[r] = window_of(c, r);
  switch (t->what.function) {
    case ALL_REDUCE: reduce(device(t->to), from, c->n, 0, t->what.count, t->what.dtype, t->what.op, seed); break;
    case REDUCE:
      if (c->rank == t->what.root) reduce(device(t->to), from, c->n, 0, t->what.count, t->what.dtype, t->what.op, seed);
      break;
    case REDUCE_SCATTER:
      reduce(device(t->to), from, c->n, t->what.count * (size_t)c->rank, t->what.count, t->what.dtype, t->what.op,
             seed);
      break;
    case BROADCAST: memcpy(device(t->to), from[t->what.root], n); break;
    case ALL_GATHER:
      for (int r = 0; r < c->n; r++) memcpy((char *)device(t->to) + n * (size_t)r, from[r], n);
  }
}

static int collective_step(task *t) {
  struct ncclComm *c = t->comm;
  struct rank_page *self = &c->common->ranks[c->rank];
  if (!t->posted) {
    size_t n = bytes(t) * (t->what.function == REDUCE_SCATTER ? (size_t)c->n : 1);
    if (!all_ranks(c, t->sequence, 1)) return 0; /* a window is free when all have read it */
    if (t->what.function != BROADCAST || c->rank == t->what.root) memcpy(window_of(c, c->rank), device(t->from), n);
    self->calls[t->sequence % RING] = t->what;
    STORE(self->posted, t->sequence + 1);
    t->posted = 1;
  }
  if (t->stuck || !all_ranks(c, t->sequence + 1, 0)) return 0;
  compare(t);
  if (t->stuck) return 0;
  move(t);
  STORE(self->done, t->sequence + 1);
  return 1;
}

/* ---- from one rank to another ---- */

static int send_step(task *t) {
  struct ncclComm *c = t->comm;
  struct channel *way = &c->common->channels[c->rank][t->what.root];
  if (!t->posted) {
    if (LOAD(way->received) < t->sequence) return 0;
    memcpy(window_between(c, c->rank, t->what.root), device(t->from), bytes(t));
    way->count = t->what.count;
    way->dtype = t->what.dtype;
    STORE(way->sent, t->sequence + 1);
    t->posted = 1;
  }
  return LOAD(way->received) > t->sequence;
}

static int recv_step(task *t) {
  struct ncclComm *c = t->comm;
  struct channel *way = &c->common->channels[t->what.root][c->rank];
  if (t->stuck || LOAD(way->sent) <= t->sequence) return 0;
  if (way->count != t->what.count || way->dtype != t->what.dtype) {
    stand_found(
        "mismatch in communicator %d: rank %d sends %zu %s, rank %d receives %zu %s: it would hang, or give wrong data",
        c->number, t->what.root, way->count, dtype_names[way->dtype], c->rank, t->what.count,
        dtype_names[t->what.dtype]);
    t->stuck = 1;
    return 0;
  }
  memcpy(device(t->to), window_between(c, t->what.root, c->rank), bytes(t));
  forget(window_between(c, t->what.root, c->rank), bytes(t));
  STORE(way->received, t->sequence + 1);
  return 1;
}

/* ---- launches ---- */

static int slots_taken;

static int slots(void) { /* how many kernels of NCCL are on the device at once; 0: as many as there are */
  const char *setting = getenv("STAND_SLOTS");
  return setting ? atoi(setting) : 0;
}

static int concerns(const launch *l, int rank) {
  for (int i = 0; i < l->n; i++)
    if (!l->tasks[i].finished && (l->tasks[i].what.function < SEND || l->tasks[i].what.root == rank)) return 1;
  return 0;
}

static int end(launch *l) {
  struct ncclComm *c = l->comm;
  if (l->holds_slot) {
    slots_taken--;
    launches_held--;
    l->holds_slot = 0;
  }
  c->pending--;
  return 1;
}

/* An aborted kernel ends early, and leaves what it likes. */
static int give_up(launch *l) {
  for (int i = 0; i < l->n; i++) {
    task *t = &l->tasks[i];
    size_t n = bytes(t) * (t->what.function == ALL_GATHER ? (size_t)l->comm->n : 1);
    if (!t->finished && t->to && (t->what.function != REDUCE || l->comm->rank == t->what.root))
      memset(device(t->to), 0xdb, n);
  }
  return end(l);
}

int launch_step(void *data) {
  launch *l = data;
  struct ncclComm *c = l->comm;
  int left = 0;
  if (c->aborting || c->broken) return give_up(l);
  if (!l->holds_slot) {
    if (slots() && slots_taken >= slots()) return 0;
    slots_taken++;
    launches_held++;
    l->holds_slot = 1;
  }
  for (int i = 0; i < l->n; i++) {
    task *t = &l->tasks[i];
    if (t->finished) continue;
    t->finished = t->what.function == SEND   ? send_step(t)
                  : t->what.function == RECV ? recv_step(t)
                                             : collective_step(t);
    left += !t->finished;
  }
  if (!left) return end(l);
  for (int r = 0; r < c->n; r++)
    if (r != c->rank && LOAD(c->common->ranks[r].gone) && concerns(l, r)) {
      stand_found("rank %d freed its buffers while a kernel of rank %d still reads them (communicator %d)", r, c->rank,
                  c->number);
      stand_sticky(CUDA_ERROR_ILLEGAL_ADDRESS);
      c->broken = 1;
      return give_up(l);
    }
  return 0;
}

int launch_wanted(void *data) {
  launch *l = data;
  struct ncclComm *c = l->comm;
  for (int i = 0; i < l->n; i++) {
    task *t = &l->tasks[i];
    if (t->what.function == SEND && LOAD(c->common->channels[c->rank][t->what.root].demanded) > t->sequence) return 1;
    if (t->what.function == RECV && LOAD(c->common->channels[t->what.root][c->rank].demanded) > t->sequence) return 1;
    for (int r = 0; r < c->n && t->what.function < SEND; r++)
      if (LOAD(c->common->ranks[r].demanded) > t->sequence) return 1;
  }
  return c->aborting || c->broken;
}

static void raise_to(uint64_t *word, uint64_t value) {
  uint64_t now = __atomic_load_n(word, __ATOMIC_RELAXED);
  while (now < value && !__atomic_compare_exchange_n(word, &now, value, 0, __ATOMIC_RELEASE, __ATOMIC_RELAXED)) {
  }
}

void launch_want(void *data) {
  launch *l = data;
  struct ncclComm *c = l->comm;
  for (int i = 0; i < l->n; i++) {
    task *t = &l->tasks[i];
    if (t->what.function == SEND) raise_to(&c->common->channels[c->rank][t->what.root].demanded, t->sequence + 1);
    else if (t->what.function == RECV) raise_to(&c->common->channels[t->what.root][c->rank].demanded, t->sequence + 1);
    else raise_to(&c->common->ranks[c->rank].demanded, t->sequence + 1);
  }
}

void launch_describe(void *data, char *text, size_t size) {
  launch *l = data;
  struct ncclComm *c = l->comm;
  const task *t = l->tasks;
  size_t n;
  while (t->finished && t < l->tasks + l->n - 1) t++;
  n = (size_t)snprintf(text, size, "communicator %d", c->number);
  if (!l->holds_slot) snprintf(text + n, size - n, ", waits for one of %d places on the device", slots());
  else if (t->what.function >= SEND) snprintf(text + n, size - n, ", waits for rank %d", t->what.root);
  else
    for (int r = 0; r < c->n && n < size; r++)
      if (LOAD(c->common->ranks[r].posted) <= t->sequence)
        n += (size_t)snprintf(text + n, size - n, ", waits for rank %d", r);
}
