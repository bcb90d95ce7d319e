/* A carrier from outside the project, in one file: messages go through named pipes, one for each channel and pair of ranks.
 *
 *     cc -shared -fPIC -I .../engine_ext/transport $(python3-config --includes) pipe_carrier.c -o pipe_carrier.so
 *     ENGINE_LANES=pipe_carrier:open_provider PIPES=/a/directory enginerun ...
 *
 * It shows what a carrier has to do, and can be told to fail (FAULT, on FAULTY_RANK or on all ranks). It serves ranks of one
 * machine, and is no faster than what it replaces.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "carrier.h"

enum { RING = ENGINE_CARRIER_MESSAGES, FAILS_AFTER = 5, LATE = 300 };

typedef struct {
  char *bytes;
  uint32_t left; /* not yet written or read */
} message;

typedef struct {
  message ring[RING];
  uint64_t head, tail; /* numbers of the oldest message, and after the newest; `tail` is atomic */
  int pipe;
} queue;

typedef struct {
  engine_carrier functions; /* first: a pointer to the one is a pointer to the other */
  const char *fault;
  int size, calls, passed;
  queue *sends, *receives; /* by rank */
} carrier;

typedef struct {
  engine_carrier_provider functions; /* first */
  int rank, size, world;
  char directory[256], fault[32];
} provider;

static int append(queue *q, void *bytes, uint32_t nbytes) {
  q->ring[q->tail % RING] = (message){bytes, nbytes}; /* the engine gives no more than the ring holds */
  __atomic_store_n(&q->tail, q->tail + 1, __ATOMIC_RELEASE);
  return ENGINE_CARRIER_DONE;
}

static int send_message(engine_carrier *functions, int rank, const void *source, uint32_t nbytes) {
  carrier *c = (carrier *)functions;
  if (!strcmp(c->fault, "busy") && c->calls++ % 2) return ENGINE_CARRIER_BUSY;
  append(&c->sends[rank], (void *)source, nbytes);
  if (!strcmp(c->fault, "slow")) usleep(1000); /* it may be sent before this returns */
  return ENGINE_CARRIER_DONE;
}

static int receive_message(engine_carrier *functions, int rank, void *target, uint32_t nbytes) {
  carrier *c = (carrier *)functions;
  return strcmp(c->fault, "refuse") ? append(&c->receives[rank], target, nbytes) : ENGINE_CARRIER_FAILED;
}

/* Write or read as much as the pipe has room for, or holds; count messages that are over. */
static int move(queue *q, int writes, uint64_t *count) {
  uint64_t tail = __atomic_load_n(&q->tail, __ATOMIC_ACQUIRE);
  while (q->head != tail) {
    message *m = &q->ring[q->head % RING];
    ssize_t n = writes ? write(q->pipe, m->bytes, m->left) : read(q->pipe, m->bytes, m->left);
    if (n < 0) return errno == EAGAIN || errno == EINTR ? ENGINE_CARRIER_DONE : ENGINE_CARRIER_FAILED;
    m->bytes += n;
    m->left -= (uint32_t)n;
    if (m->left == 0) {
      q->head++;
      ++*count;
    }
  }
  return ENGINE_CARRIER_DONE;
}

static int progress(engine_carrier *functions, int rank, uint64_t *sent, uint64_t *arrived) {
  carrier *c = (carrier *)functions;
  if (!strcmp(c->fault, "stand")) return ENGINE_CARRIER_DONE;
  if (!strcmp(c->fault, "late")) return c->calls++ < LATE ? (usleep(1000), ENGINE_CARRIER_DONE) : ENGINE_CARRIER_FAILED;
  if (move(&c->sends[rank], 1, sent) < 0 || move(&c->receives[rank], 0, arrived) < 0) return ENGINE_CARRIER_FAILED;
  c->passed += (int)*arrived;
  if (!strcmp(c->fault, "fail") && c->passed >= FAILS_AFTER) return ENGINE_CARRIER_FAILED;
  if (!strcmp(c->fault, "lie") && c->passed >= FAILS_AFTER) *arrived += 1;
  return ENGINE_CARRIER_DONE;
}

static int sum_nothing(engine_carrier *functions, void *memory, uint64_t count, int item_bytes) {
  (void)functions, (void)memory, (void)count, (void)item_bytes;
  return ENGINE_CARRIER_FAILED;
}

static int close_carrier(engine_carrier *functions) {
  carrier *c = (carrier *)functions;
  if (!strcmp(c->fault, "stuck")) return ENGINE_CARRIER_BUSY;
  for (int r = 0; r < c->size; r++) {
    if (c->sends[r].pipe >= 0) close(c->sends[r].pipe);
    if (c->receives[r].pipe >= 0) close(c->receives[r].pipe);
  }
  free(c->sends);
  free(c->receives);
  free(c);
  return ENGINE_CARRIER_DONE;
}

static int open_pipe(const provider *p, uint32_t channel, int from, int to) {
  char path[400];
  snprintf(path, sizeof path, "%s/%d.%u.%d-%d", p->directory, p->world, channel, from, to);
  if (mkfifo(path, 0600) < 0 && errno != EEXIST) return -1;
  return open(path, O_RDWR | O_NONBLOCK | O_CLOEXEC); /* open at both ends, so no open waits for the other rank */
}

static engine_carrier *open_channel(engine_carrier_provider *functions, uint32_t channel, void *memory, uint64_t nbytes) {
  const provider *p = (provider *)functions;
  carrier *c = calloc(1, sizeof *c);
  (void)memory, (void)nbytes; /* what a network card would have to know */
  if (!c) return NULL;
  c->functions = (engine_carrier){0, send_message, receive_message, progress, close_carrier, NULL, NULL, NULL};
  if (!strcmp(p->fault, "half") || (channel && !strcmp(p->fault, "half set"))) c->functions.sum = sum_nothing;
  c->fault = p->fault;
  c->size = p->size;
  c->sends = calloc((size_t)p->size, sizeof *c->sends);
  c->receives = calloc((size_t)p->size, sizeof *c->receives);
  if (!c->sends || !c->receives || !strcmp(p->fault, "memory")) return NULL;
  if (!strcmp(p->fault, "raise")) return PyErr_SetString(PyExc_OSError, "the pipes are gone"), NULL;
  if (channel && !strcmp(p->fault, "raise set")) return PyErr_SetString(PyExc_RuntimeError, "no queue is left"), NULL;
  for (int r = 0; r < p->size; r++) {
    c->sends[r].pipe = r == p->rank ? -1 : open_pipe(p, channel, p->rank, r);
    c->receives[r].pipe = r == p->rank ? -1 : open_pipe(p, channel, r, p->rank);
  }
  return &c->functions;
}

static void free_provider(PyObject *capsule) { free(PyCapsule_GetPointer(capsule, ENGINE_CARRIER_CAPSULE)); }

/* open_provider(*, rank, size, generation, seconds, other_failed): what `lanes=pipe_carrier:open_provider` calls on each rank. */
static PyObject *open_provider(PyObject *module, PyObject *args, PyObject *named) {
  static char *names[] = {"rank", "size", "generation", "seconds", "other_failed", NULL};
  const char *directory = getenv("PIPES"), *fault = getenv("FAULT"), *faulty = getenv("FAULTY_RANK");
  PyObject *other_failed;
  provider *p = calloc(1, sizeof *p);
  double seconds;
  (void)module;
  if (!p) return PyErr_NoMemory();
  if (!PyArg_ParseTupleAndKeywords(args, named, "$iiidO", names, &p->rank, &p->size, &p->world, &seconds, &other_failed)) {
    free(p);
    return NULL;
  }
  snprintf(p->directory, sizeof p->directory, "%s", directory ? directory : ".");
  snprintf(p->fault, sizeof p->fault, "%s", fault && (!faulty || atoi(faulty) == p->rank) ? fault : "");
  p->functions.version = strcmp(p->fault, "version") ? ENGINE_CARRIER_VERSION : ENGINE_CARRIER_VERSION + 1;
  p->functions.channels = strcmp(p->fault, "more") ? 2 : 3; /* the world's, and one for a process set; others use connections */
  p->functions.open = open_channel;
  return PyCapsule_New(p, ENGINE_CARRIER_CAPSULE, free_provider);
}

static PyMethodDef methods[] = {
    {"open_provider", (PyCFunction)(void (*)(void))open_provider, METH_VARARGS | METH_KEYWORDS, "Return the carriers of a rank."},
    {NULL, NULL, 0, NULL},
};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "pipe_carrier", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_pipe_carrier(void) {
  PyObject *module = PyModule_Create(&definition);
#ifdef Py_GIL_DISABLED
  if (module) PyUnstable_Module_SetGIL(module, Py_MOD_GIL_NOT_USED);
#endif
  return module;
}
