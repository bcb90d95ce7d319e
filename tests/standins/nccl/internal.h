/* What the sources of the stand-in for libnccl share. */
#ifndef STAND_NCCL_INTERNAL_H
#define STAND_NCCL_INTERNAL_H

#include "../cuda/stand.h"
#include "engine_ext/gpu/nccl.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef STAND_NCCL_VERSION /* what it says it is; functions that came later are missing */
#define STAND_NCCL_VERSION 22807
#endif

#define X(name, parameters, since) STAND_API ncclResult_t name parameters;
NCCL_FUNCTIONS(X)
#undef X

enum { RANKS = 32, RING = 256 };
static const size_t WINDOW = (size_t)1 << 30; /* bytes that one call may move; memory is taken as it is used */

enum { ALL_REDUCE, BROADCAST, REDUCE, ALL_GATHER, REDUCE_SCATTER, SEND, RECV };

typedef struct description { /* of a collective call: equal on all ranks */
  int function, dtype, op, root;
  size_t count;
} description;

/* What the ranks of a communicator share. Plain words are written by one rank before a word that is released. */
typedef struct shared {
  uint64_t nonce;
  int joined; /* ranks that came to init */
  struct rank_page {
    int present, pid, version, n_ranks;
    char device[16];
    int called, aborted, gone, finalized, destroyed;
    uint64_t posted, done, demanded; /* collectives: how many */
    description calls[RING];
  } ranks[RANKS];
  struct channel { /* from one rank to another */
    uint64_t sent, received, demanded;
    size_t count;
    int dtype;
    int called[2]; /* by its sender, by its receiver */
  } channels[RANKS][RANKS];
} shared;

struct ncclComm {
  struct ncclComm *next;
  shared *common;
  char *windows; /* one for each rank, then one for each channel */
  int rank, n, blocking, device, number;
  int aborting, revoked, revoking, connected, broken;
  int pending; /* launches that have not ended */
  int graphs;  /* launches that a living graph has */
  int freed;   /* an abort has been called for: the flag stays up */
  int state;   /* what ncclCommGetAsyncError says */
  CUcontext context;
  uint64_t collectives, sent[RANKS], received[RANKS];
  pthread_t user; /* who used it first */
  char error[256];
};

typedef struct task {
  struct ncclComm *comm;
  CUstream stream;
  const void *from;
  void *to;
  description what; /* `root` is the peer of a send or receive */
  uint64_t sequence;
  int posted, finished, stuck;
} task;

typedef struct launch {
  struct ncclComm *comm;
  int holds_slot, n;
  task tasks[];
} launch;

#define LOAD(word) __atomic_load_n(&(word), __ATOMIC_ACQUIRE)
#define STORE(word, value) __atomic_store_n(&(word), value, __ATOMIC_RELEASE)

extern const char *const function_names[];
extern const char *const dtype_names[];
size_t dtype_size(int dtype);
void reduce(void *to, char *const *from, int n, size_t first, size_t count, int dtype, int op, uint64_t seed);

/* One step of a launch: the operation of the stand-in for libcuda. */
int launch_step(void *data);
int launch_wanted(void *data);
void launch_want(void *data);
void launch_describe(void *data, char *text, size_t size);
extern int launches_held; /* of this process: begun and not ended, of communicators that nobody aborts */

/* At the door of every call: one thread at a time, the communicator not in progress. */
ncclResult_t nccl_enter(const char *call, ncclComm_t comm, int may_be_in_progress);
ncclResult_t nccl_leave(ncclResult_t result);
ncclResult_t refuse(ncclComm_t comm, ncclResult_t code, const char *format, ...) __attribute__((format(printf, 3, 4)));
int is_dead(int pid);

ncclResult_t connect_ranks(launch *l);
int group_depth(void);
void group_abort(ncclComm_t comm);
void abort_all(ncclComm_t *comms, int n);
void in_background(void *(*body)(void *), void *argument);

#endif
